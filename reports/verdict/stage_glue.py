"""Own errors of the topology glue: rows come together before the layer and back after it."""

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from moe.golden import round_bf16
from reports.verdict.band import fp32_noise
from reports.verdict.captured import where_captured
from reports.verdict.compared import BAND, check_stored
from reports.verdict.decode import BLOCK, dequantized
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import StageChecks
from reports.verdict.stage_tail import check_shared_expert, sum_over_ranks
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject
from topology.sync import PADDING, Gather, Return


def check_glue_in(subject: Subject, ledger: Ledger) -> None:
    """Own rows are the tokens dealt out; layer rows are the rows of those who own them."""
    with where_captured(ledger, "glue_in/own", MOVES):
        _check_own_rows(subject, ledger)
    with where_captured(ledger, "glue_in/hidden_states", MOVES):
        _check_layer_rows(subject, ledger)
    with where_captured(ledger, "glue_in/input_ids", MOVES):
        _check_input_ids(subject, ledger)


def _check_own_rows(subject: Subject, ledger: Ledger) -> None:
    own = subject.own_rows
    real = own.token != PADDING
    got = subject.tensor_of(subject.ranks, Stage.GLUE_IN, "own")
    ledger.moved(
        Stage.GLUE_IN,
        "own",
        own[real],
        got=got[real],
        want=take_rows(subject.hidden_states, own.token[real]),
    )


def _check_layer_rows(subject: Subject, ledger: Ledger) -> None:
    own, rows = subject.own_rows, subject.layer_rows
    sent = _sent(subject, ledger)
    owners = subject.first_rows(torch.ones_like(own.token, dtype=torch.bool), own)
    held = rows.token != PADDING
    due = take_rows(sent, owners[rows.token[held]])
    if subject.layer.sync.gather in (Gather.ALL_REDUCE, Gather.REDUCE_SCATTER_ALL_GATHER):
        due = due + 0.0  # a sum with zeros: -0 comes out as +0
    ledger.moved(
        Stage.GLUE_IN,
        "hidden_states",
        rows[held],
        got=subject.layer_tensor(Stage.GLUE_IN, "hidden_states")[held],
        want=due,
    )


def _check_input_ids(subject: Subject, ledger: Ledger) -> None:
    """Vocabulary ids stand beside their tokens' rows, where experts follow from them."""
    if subject.layer.routing.hashed:
        rows = subject.layer_rows
        got_ids = subject.layer_tensor(Stage.GLUE_IN, "input_ids")[:, None]
        assert subject.batch.input_ids is not None
        on_padding = torch.zeros(1, dtype=torch.int64)
        ids = torch.cat([subject.batch.input_ids, on_padding])[rows.token][:, None]
        ledger.moved(Stage.GLUE_IN, "input_ids", rows, got=got_ids, want=ids)


def _sent(subject: Subject, ledger: Ledger) -> Tensor:
    """[all own rows, H] what each rank gives to the gather: its rows, or what fp8 makes of them."""
    own = subject.tensor_of(subject.ranks, Stage.GLUE_IN, "own")
    layer = subject.layer
    if not (layer.gathers_fp8 and layer.sync.gather is Gather.ALL_GATHER_V):
        return own
    wire = subject.tensor_of(subject.ranks, Stage.GLUE_IN, "wire")
    scale = subject.scale_of(subject.ranks, Stage.GLUE_IN, "wire")
    if wire.dtype != torch.float8_e4m3fn or scale is None:
        return own  # a broken contract, and reported as one
    checks = StageChecks(ledger, Stage.GLUE_IN, subject.layer, subject.own_rows)
    checks.quantised("wire", wire, scale, own)
    return round_bf16(dequantized(wire, scale, BLOCK)).to(torch.bfloat16)


def check_glue_out(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> None:
    """Rows come back to their owner, summed here where the plan says so; then what is added."""
    name = "hidden_states"
    if subject.layer.shared is SharedExpertMode.LOCAL:
        _check_local_shared(subject, weights, ledger)
        name = "returned"
    with where_captured(ledger, f"glue_out/{name}", MOVES, BAND):
        if subject.layer.sync.returning in (Return.REDUCE_SCATTER, Return.REDUCE_SCATTER_V):
            _check_scattered_sums(subject, name, ledger)
        else:
            _check_moved_back(subject, name, ledger)


def _check_moved_back(subject: Subject, name: str, ledger: Ledger) -> None:
    """Each rank has the finished rows of its own."""
    for rank in subject.ranks:
        ledger.moved(
            Stage.GLUE_OUT,
            name,
            subject.own_rows_of([rank]),
            got=subject.stage(Stage.GLUE_OUT, rank)[name],
            want=_returned(subject, rank),
        )


def _returned(subject: Subject, rank: int) -> Tensor:
    """[O, H] the finished rows that a rank owns, wherever the tail left them."""
    sync, layout = subject.layer.sync, subject.layer.layout
    finished = subject.stage(Stage.TAIL, rank)["output"]
    match sync.returning:
        case Return.ALL_GATHER:
            return subject.tensor_of(layout.attention_tp_group(rank), Stage.TAIL, "output")
        case Return.DP_SCATTER:
            return finished[_own_slot(subject, rank)]
        case _:
            return finished


def _own_slot(subject: Subject, rank: int) -> slice:
    """A rank's own rows among the gathered ones."""
    sync, attention = subject.layer.sync, subject.layer.layout.attention
    axis = "cp" if attention.degree("cp") > 1 else "dp"
    place = attention.coord(rank, axis)
    start = sum(sync.slots[:place])
    return slice(start, start + sync.slots[place])


def _check_scattered_sums(subject: Subject, name: str, ledger: Ledger) -> None:
    """Each own row is the sum of that row over the ranks, in fp32, rounded once."""
    summed = sum_over_ranks(subject, "output")
    for rank in subject.ranks:
        slot = _own_slot(subject, rank)
        want, magnitude = summed.value[slot], summed.magnitude[slot]
        check_stored(
            ledger,
            Stage.GLUE_OUT,
            name,
            subject.own_rows_of([rank]),
            got=subject.stage(Stage.GLUE_OUT, rank)[name].to(torch.float64),
            want=want,
            noise=fp32_noise(magnitude, subject.layer.world_size),
        )


def _check_local_shared(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> None:
    """The shared expert over own rows, added to what came back."""
    check_shared_expert(
        subject,
        weights,
        ledger,
        Stage.GLUE_OUT,
        lambda ranks: subject.tensor_of(ranks, Stage.GLUE_IN, "own"),
        subject.own_rows,
    )
    with where_captured(ledger, "glue_out/hidden_states", BAND):
        _check_local_sum(subject, ledger)


def _check_local_sum(subject: Subject, ledger: Ledger) -> None:
    returned, shared, got = (
        subject.tensor_of(subject.ranks, Stage.GLUE_OUT, name).to(torch.float64)
        for name in ("returned", "shared.output", "hidden_states")
    )
    want = returned + shared
    check_stored(
        ledger,
        Stage.GLUE_OUT,
        "hidden_states",
        subject.own_rows,
        got=got,
        want=want,
        noise=fp32_noise(returned.abs() + shared.abs(), 1),
    )

"""Own errors of the topology glue: rows come together before the layer and back after it."""

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from moe.golden import round_bf16
from reports.verdict.band import fp32_noise
from reports.verdict.compared import check_stored
from reports.verdict.decode import dequantized
from reports.verdict.layer import GATHERED_GROUP
from reports.verdict.ledger import Ledger
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import StageChecks
from reports.verdict.stage_tail import check_shared_expert, sum_over_ranks
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject
from topology.sync import PADDING, Gather, Return


def check_glue_in(subject: Subject, ledger: Ledger) -> None:
    """Own rows are the tokens dealt out; layer rows are the rows of those who own them."""
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
    sent, owners = _sent(subject, ledger), subject.first_rows(torch.ones_like(real), own)
    rows = subject.layer_rows
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
    if "input_ids" in subject.stage(Stage.GLUE_IN, 0):
        got_ids = subject.layer_tensor(Stage.GLUE_IN, "input_ids")[:, None]
        assert subject.batch.input_ids is not None
        on_padding = torch.zeros(1, dtype=torch.int64)
        ids = torch.cat([subject.batch.input_ids, on_padding])[rows.token][:, None]
        ledger.moved(Stage.GLUE_IN, "input_ids", rows, got=got_ids, want=ids)


def _sent(subject: Subject, ledger: Ledger) -> Tensor:
    """[all own rows, H] what each rank gives to the gather: its rows, or what fp8 makes of them."""
    own = subject.tensor_of(subject.ranks, Stage.GLUE_IN, "own")
    if "wire" not in subject.stage(Stage.GLUE_IN, 0):
        return own
    wire = subject.tensor_of(subject.ranks, Stage.GLUE_IN, "wire")
    scale = subject.scale_of(subject.ranks, Stage.GLUE_IN, "wire")
    if wire.dtype != torch.float8_e4m3fn or scale is None:
        return own  # a broken contract, and reported as one
    checks = StageChecks(ledger, Stage.GLUE_IN, subject.layer, subject.own_rows)
    checks.quantised("wire", wire, scale, own)
    return round_bf16(dequantized(wire, scale, GATHERED_GROUP)).to(torch.bfloat16)


def check_glue_out(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> None:
    """Rows come back to their owner, summed here where the plan says so; then what is added."""
    name = "hidden_states"
    if subject.layer.shared is SharedExpertMode.LOCAL:
        _check_local_shared(subject, weights, ledger)
        name = "returned"
    if subject.layer.sync.returning in (Return.REDUCE_SCATTER, Return.REDUCE_SCATTER_V):
        _check_scattered_sums(subject, name, ledger)
        return
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
    own = subject.tensor_of(subject.ranks, Stage.GLUE_IN, "own")
    check_shared_expert(subject, weights, ledger, Stage.GLUE_OUT, own, subject.own_rows)
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

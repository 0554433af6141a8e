"""Own error of the tail: shared expert, scaling factor, and the sum over ranks if it is here."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from moe.golden import Stores, Terms, tail
from reports.verdict.band import fp32_noise
from reports.verdict.captured import where_captured
from reports.verdict.compared import BAND, check_stored
from reports.verdict.decode import dequantized
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.rows import Rows, distinct
from reports.verdict.rules import QUANTISER
from reports.verdict.stage_checks import StageChecks, product
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject
from topology.sync import Reducer


def check_tail(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> None:
    """The shared expert step by step, then the sums it and the routed branch enter."""
    holders = subject.layer.ranks_with_shared_in_tail
    if holders:

        def source(ranks: Sequence[int]) -> Tensor:
            return subject.tensor_of(ranks, Stage.GLUE_IN, "hidden_states")

        rows = subject.rows_of(holders)
        check_shared_expert(subject, weights, ledger, Stage.TAIL, source, rows)
    if subject.layer.is_all_to_all:
        with where_captured(ledger, "tail/output", BAND):
            _check_scaled_sum(subject, ledger)
    else:
        _check_reduction(subject, ledger)


def _check_scaled_sum(subject: Subject, ledger: Ledger) -> None:
    """``shared + factor * routed`` of whole results: fp32 inside, one rounding."""
    routed = _traced(subject, Stage.COMBINE, "routed")
    shared = None
    if subject.layer.shared is not None:
        shared = _traced(subject, Stage.TAIL, "shared.output")
    factor = 1.0 if subject.view.folds_factor else subject.layer.factor
    want = tail(routed, shared, factor)
    noise = fp32_noise(want.magnitude, 2)  # the product, the addition
    _cells(subject, ledger, "output", want.value, noise)


def _check_reduction(subject: Subject, ledger: Ledger) -> None:
    """What each rank gives to the reduction, the reduction if it is here, what is added after."""
    layer = subject.layer
    with where_captured(ledger, "tail/summand", BAND):
        _check_summand(subject, ledger)
    if layer.sync.reducer is Reducer.GLUE_OUT:
        with where_captured(ledger, "tail/output", MOVES):
            _passed_on(subject, ledger, "summand")
        return
    with where_captured(ledger, "tail/reduced", BAND, MOVES):
        _check_all_reduce(subject, ledger)
    with where_captured(ledger, "tail/output", BAND, MOVES):
        if layer.shared is SharedExpertMode.REPLICATED:
            reduced = _traced(subject, Stage.TAIL, "reduced")
            shared = _traced(subject, Stage.TAIL, "shared.output")
            noise = fp32_noise(reduced.abs() + shared.abs(), 1)
            _cells(subject, ledger, "output", reduced + shared, noise)
        else:
            _passed_on(subject, ledger, "reduced")


def _check_summand(subject: Subject, ledger: Ledger) -> None:
    """This rank's partial, and what of the shared expert it adds to the sum."""
    layer = subject.layer
    partial = _traced(subject, Stage.COMBINE, "routed")
    adders = layer.ranks_with_shared_in_tail
    if layer.shared is SharedExpertMode.REPLICATED and layer.sync.reducer is not Reducer.GLUE_OUT:
        adders = range(0)
    added = torch.zeros_like(partial)
    if adders:
        at = torch.isin(subject.layer_rows.rank, torch.tensor(adders))
        added[at] = subject.tensor_of(adders, Stage.TAIL, "shared.output").to(torch.float64)
    want = partial + added
    _cells(subject, ledger, "summand", want, fp32_noise(partial.abs() + added.abs(), 1))


def _check_all_reduce(subject: Subject, ledger: Ledger) -> None:
    """Every rank has the sum of all ranks' summands, in fp32, rounded once, and the same bits.

    Ranks that hold the same tokens would drift apart by any other.
    """
    want = sum_over_ranks(subject, "summand")
    noise = fp32_noise(want.magnitude, subject.layer.world_size)
    first = subject.stage(Stage.TAIL, 0)["reduced"]
    for rank in subject.ranks:
        got, rows = subject.stage(Stage.TAIL, rank)["reduced"], subject.rows_of([rank])
        check_stored(
            ledger,
            Stage.TAIL,
            "reduced",
            rows,
            got=got.to(torch.float64),
            want=want.value,
            noise=noise,
        )
        ledger.moved(Stage.TAIL, "reduced", rows, got=got, want=first)


def sum_over_ranks(subject: Subject, name: str) -> Terms:
    """[T, H] sum of one traced tail tensor over all ranks, which hold the same rows."""
    value = magnitude = torch.zeros((), dtype=torch.float64)
    for rank in subject.ranks:
        term = subject.stage(Stage.TAIL, rank)[name].to(torch.float64)
        value, magnitude = value + term, magnitude + term.abs()
    return Terms(value=value, magnitude=magnitude)


def _traced(subject: Subject, stage: Stage, name: str) -> Tensor:
    return subject.layer_tensor(stage, name).to(torch.float64)


def _cells(subject: Subject, ledger: Ledger, name: str, want: Tensor, noise: Tensor) -> None:
    check_stored(
        ledger,
        Stage.TAIL,
        name,
        subject.layer_rows,
        got=_traced(subject, Stage.TAIL, name),
        want=want,
        noise=noise,
    )


def _passed_on(subject: Subject, ledger: Ledger, name: str) -> None:
    ledger.moved(
        Stage.TAIL,
        "output",
        subject.layer_rows,
        got=subject.layer_tensor(Stage.TAIL, "output"),
        want=subject.layer_tensor(Stage.TAIL, name),
    )


def check_shared_expert(
    subject: Subject,
    weights: JudgedWeights,
    ledger: Ledger,
    stage: Stage,
    source: Callable[[Sequence[int]], Tensor],
    rows: Rows,
) -> None:
    """The dense path step by step, rank by rank where weights differ.

    Args:
        subject: the forward.
        weights: what each rank's GEMMs read.
        ledger: takes the findings.
        stage: whose trace holds ``shared.*``: tail, or glue_out for local shared experts.
        source: some ranks -> [their rows, H] bf16 traced input of the path.
        rows: their coordinates, ranks ascending.
    """
    present = set(distinct(rows.rank))
    for group in weights.ranks_with_equal_shared():
        ranks = [rank for rank in group if rank in present]
        at = torch.isin(rows.rank, torch.tensor(ranks, dtype=torch.int64))
        checks = StageChecks(ledger, stage, subject.layer, rows[at])
        if ranks:
            _check_dense_path(subject, weights, checks, ranks, partial(source, ranks))


def _check_dense_path(
    subject: Subject,
    weights: JudgedWeights,
    checks: StageChecks,
    ranks: Sequence[int],
    source: Callable[[], Tensor],
) -> None:
    """Quantise, GEMM1, activation, quantise, GEMM2 of ranks with the same shared weights."""
    pair, stage, ledger = weights.shared(ranks[0]), checks.stage, checks.ledger
    assert pair is not None

    def traced(name: str) -> Tensor:
        return subject.tensor_of(ranks, stage, name)

    for name, before, weight, after in (
        ("shared.input", source, pair[0], "shared.gate_up"),
        (
            "shared.hidden_states",
            lambda: traced("shared.activation"),
            pair[1],
            "shared.output",
        ),
    ):
        with where_captured(ledger, f"{stage}/{name}", QUANTISER, MOVES):
            checks.quantised(name, traced(name), subject.scale_of(ranks, stage, name), before())
        with where_captured(ledger, f"{stage}/{after}", BAND):
            scale, group = (
                subject.scale_of(ranks, stage, name),
                subject.layer.scales_of(stage, name),
            )
            gemm_in = dequantized(traced(name), scale, group.group_size)
            checks.gemm(after, traced(after), product(gemm_in, weight), gemm_in.shape[1])
    with where_captured(ledger, f"{stage}/shared.activation", BAND):
        gate_up, activation = traced("shared.gate_up"), traced("shared.activation")
        checks.activation("shared.activation", activation, gate_up, Stores.PRODUCT)

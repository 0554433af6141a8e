"""What exact mode can prove of a forward's inputs, and its check where that is enough."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from moe.arithmetic import AccumulatorWidths
from moe.formats import Stage
from moe.golden import GoldenModel, GoldenTokens, GoldenTrace
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.deviation import Deviation, NotAsked
from reports.verdict.exact_agreement import disagreement
from reports.verdict.exact_check import check_exact, compared_cells
from reports.verdict.exact_compared import EXACT
from reports.verdict.exact_refusal import refused
from reports.verdict.exact_shares import Shares, StageShare
from reports.verdict.exact_sums import Conditions, Reduction
from reports.verdict.ledger import Ledger
from reports.verdict.nominal_weights import NominalWeights
from reports.verdict.stage_checks import CONTRACT
from reports.verdict.subject import Subject


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CertificateFacts:
    """What is certified of one forward.

    stages              stage -> shares of what is compared there; none where nothing is
    output              of the layer's output, [T, H]
    reductions          every kind of sum
    least               the condition that fewest cells fulfil; None: all of them fulfil all
    least_share         and how many do
    same_topology_only  another topology may answer otherwise
    widths              bits that the GEMM backend's sums keep
    refusal             why the exact check is not asked; None: it is
    disagreement        what makes certificate and golden unfit to judge; None: they agree
    output_cells        [T, H] bool, which cells of the output are certified
    """

    stages: Mapping[Stage, StageShare]
    output: StageShare
    reductions: tuple[Reduction, ...]
    least: str | None
    least_share: float
    same_topology_only: bool
    widths: AccumulatorWidths
    refusal: str | None
    disagreement: str | None
    output_cells: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reference:
    """What a forward is certified against.

    model     for the golden
    weights   without the rounding of scales
    golden    the same-recipe golden of the run's own routes
    ep_ranks  [T, K] int64, the EP rank that computes each route
    """

    model: GoldenModel
    weights: NominalWeights
    golden: GoldenTokens
    ep_ranks: Tensor


def certify(
    subject: Subject, against: Reference, golden: GoldenTrace, ledger: Ledger
) -> CertificateFacts | None:
    """Certify a forward and, if enough of its output is, compare it bitwise.

    Returns:
        None where inputs are not made for it, or no rank has a token.
    """
    layer = subject.layer
    if layer.widths is None:
        return None
    _check_widths(subject, layer.widths, ledger)
    if not len(subject.hidden_states):
        ledger.put_aside(NotAsked(check=EXACT, what="every stage", why="no rank has a token"))
        return None
    stages, sums = certified_forward(subject, against)
    conditions = stages.conditions
    output = StageShare.of(sums.output.value, sums.output.is_certain)
    least, least_share = conditions.least()
    refusal = refused(output.certified, least, least_share)
    unfit = disagreement(stages, sums, golden)
    shares = Shares()
    compared = shares.counting(compared_cells(subject, stages, sums, ledger))
    if refusal is None and unfit is None:
        check_exact(subject, compared, ledger)
    else:
        deque(compared, maxlen=0)  # counts, and compares nothing
    return CertificateFacts(
        stages=shares.by_stage(),
        output=output,
        reductions=tuple(conditions.reductions.values()),
        least=least,
        least_share=least_share,
        same_topology_only=sums.same_topology_only,
        widths=layer.widths,
        refusal=refusal,
        disagreement=unfit,
        output_cells=sums.output.is_certain,
    )


def certified_forward(subject: Subject, against: Reference) -> tuple[CertifiedLayer, CertifiedSums]:
    """What is certain of a forward: up to the experts' outputs, and behind them.

    Sums keep the bits that were measured, or those declared, whichever are fewer.
    """
    layer = subject.layer
    assert layer.widths is not None
    stages = CertifiedLayer(
        replace(layer, arithmetic=layer.widths.limit(layer.arithmetic)),
        against.model,
        against.weights,
        subject.hidden_states,
        against.golden.topk_ids,
        Conditions(),
    )
    sums = CertifiedSums(stages, against.model, against.golden.topk_weights, against.ep_ranks)
    return stages, sums


def _check_widths(subject: Subject, widths: AccumulatorWidths, ledger: Ledger) -> None:
    """Contract: the GEMM backend, which all ranks share, sums in the bits that it declares."""
    declared = subject.layer.arithmetic
    for where, measured, due in (
        ("inside a block", widths.in_block, declared.bits_in_block),
        ("across blocks", widths.across_blocks, declared.accumulator_bits),
    ):
        if measured < due:
            detail = f"sums {where} keep {measured} bits, the backend declares {due}"
            for stage, rank in product((Stage.GEMM1, Stage.GEMM2), subject.ranks):
                ledger.report(
                    Deviation(
                        check=CONTRACT,
                        stage=stage,
                        rank=rank,
                        tensor="accumulator",
                        got=float(measured),
                        want=float(due),
                        detail=detail,
                    )
                )

"""What exact mode can prove of a forward's inputs, and its check where that is enough."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.arithmetic import AccumulatorWidths
from moe.formats import Stage
from moe.golden import GoldenModel, GoldenTokens
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.exact_check import check_exact
from reports.verdict.exact_rows import Certain
from reports.verdict.exact_sums import Conditions, Reduction
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.nominal_weights import NominalWeights
from reports.verdict.stage_checks import CONTRACT
from reports.verdict.subject import Subject

LEAST_SHARE = 0.9
"""Of the output's cells: with fewer certified the check says too little, and the band judges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Of a stage's cells in canonical coordinates.

    certified  that can hold one value only
    void       of all: certified and an ideal zero, in which a fault that scales cannot show
    """

    certified: float
    void: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CertificateFacts:
    """What is certified of one forward.

    stages              stage -> shares
    reductions          every kind of sum
    least               the condition that fewest cells fulfil
    least_share         and how many do
    same_topology_only  another topology may answer otherwise
    widths              measured of the GEMM backend
    refusal             why the exact check is not asked; None: it is
    output_cells        [T, H] bool, which cells of the output are certified
    """

    stages: Mapping[Stage, StageShare]
    reductions: tuple[Reduction, ...]
    least: str
    least_share: float
    same_topology_only: bool
    widths: AccumulatorWidths
    refusal: str | None
    output_cells: Tensor

    @property
    def output(self) -> StageShare:
        """Of the layer's output."""
        return self.stages[Stage.GLUE_OUT]


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


def certify(subject: Subject, against: Reference, ledger: Ledger) -> CertificateFacts | None:
    """Certify a forward and, if enough of its output is, compare it bitwise.

    Returns:
        None where no backend was measured, as in other modes, or no rank has a token.
    """
    layer = subject.layer
    if layer.widths is None or not len(subject.hidden_states):
        return None
    _check_widths(layer, layer.widths, ledger)
    conditions = Conditions()
    stages = CertifiedLayer(
        layer,
        against.model,
        against.weights,
        subject.hidden_states,
        against.golden.topk_ids,
        conditions,
    )
    sums = CertifiedSums(stages, against.model, against.golden.topk_weights, against.ep_ranks)
    sums.keep_agreeing(against.golden.output)
    facts = _facts(layer.widths, stages, sums, conditions)
    if facts.refusal is None:
        check_exact(subject, stages, sums, ledger)
    return facts


def _facts(
    widths: AccumulatorWidths,
    stages: CertifiedLayer,
    sums: CertifiedSums,
    conditions: Conditions,
) -> CertificateFacts:
    routes = stages.routes
    shares = {
        Stage.PRE_PERMUTE: _share(Certain(stages.grouped.codes, stages.grouped.is_certain)),
        Stage.GEMM1: _share(routes.gate_up),
        Stage.ACTIVATION: _share(Certain(routes.middle.codes, routes.middle.is_certain)),
        Stage.GEMM2: _share(routes.outputs[0]),
        Stage.COMBINE: _share(sums.routed),
        Stage.GLUE_OUT: _share(sums.output),
    }
    least, least_share = conditions.least()
    certified = shares[Stage.GLUE_OUT].certified
    refusal = None
    if certified < LEAST_SHARE:
        refusal = (
            f"{certified:.1%} of the output is certified, {LEAST_SHARE:.0%} are needed; the "
            f"condition that fewest cells fulfil: {least} ({least_share:.1%})"
        )
    return CertificateFacts(
        stages=shares,
        reductions=tuple(conditions.reductions.values()),
        least=least,
        least_share=least_share,
        same_topology_only=sums.same_topology_only,
        widths=widths,
        refusal=refusal,
        output_cells=sums.output.is_certain,
    )


def _share(cells: Certain) -> StageShare:
    certified = cells.is_certain.to(torch.float64).mean()
    void = (cells.is_certain & (cells.value == 0)).to(torch.float64).mean()
    return StageShare(certified=float(certified), void=float(void))


def _check_widths(layer: JudgedLayer, widths: AccumulatorWidths, ledger: Ledger) -> None:
    """Contract: the GEMM backend sums in at least the bits that it declares."""
    for where, measured, declared in (
        ("inside a block", widths.in_block, layer.arithmetic.bits_in_block),
        ("across blocks", widths.across_blocks, layer.arithmetic.accumulator_bits),
    ):
        if measured < declared:
            for stage in (Stage.GEMM1, Stage.GEMM2):
                ledger.report(
                    Deviation(
                        check=CONTRACT,
                        stage=stage,
                        rank=0,
                        tensor="accumulator",
                        got=float(measured),
                        want=float(declared),
                        detail=f"sums {where} keep {measured} bits, the backend declares "
                        f"{declared}",
                    )
                )

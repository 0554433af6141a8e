"""What a result says of exact mode: its certificate, a refusal, what it could have seen."""

from collections.abc import Sequence
from math import log2

import torch
from torch import Tensor

from moe.arithmetic import BF16_ROUNDOFF
from moe.formats import Stage
from reports.certificate_record import Certificate, CertifiedStage, CertifiedSum
from reports.verdict.certificate import CertificateFacts
from reports.verdict.exact_sums import Reduction
from reports.verdict.judgement import Judgement
from scenarios.exact_weights import pattern_of


def certificate_of(judgements: Sequence[Judgement]) -> Certificate | None:
    """Of the rounds of exact mode: the first one that was refused, or else the first.

    None where nothing was to be certified.
    """
    found = [(one.certificate, one.same_recipe.topk_ids) for one in judgements if one.certificate]
    if not found:
        return None
    facts, topk_ids = next((one for one in found if one[0].refusal), found[0])
    return Certificate(
        stages=[
            CertifiedStage(stage=stage, certified=share.certified, void=share.void)
            for stage, share in facts.stages.items()
        ],
        sums=[_sum(reduction) for reduction in facts.reductions],
        least_condition=facts.least,
        least_share=facts.least_share,
        same_topology_only=facts.same_topology_only,
        patterns=_patterns(topk_ids),
        accumulator_bits={
            "in block": facts.widths.in_block,
            "across blocks": facts.widths.across_blocks,
        },
        smallest_relative_effect=BF16_ROUNDOFF,
        refusal=facts.refusal,
    )


def _sum(reduction: Reduction) -> CertifiedSum:
    ratio = reduction.largest / reduction.quantum
    return CertifiedSum(
        stage=reduction.stage,
        name=reduction.name,
        bits=reduction.bits,
        quantum=reduction.quantum,
        largest=reduction.largest,
        margin_bits=reduction.bits - (log2(ratio) if ratio > 0 else 0.0),
        certified=reduction.certain / reduction.cells if reduction.cells else 1.0,
    )


def _patterns(topk_ids: Tensor) -> dict[str, float]:
    """Share of the routes by the pattern of their experts."""
    experts, counts = torch.unique(topk_ids[topk_ids >= 0], return_counts=True)
    shares: dict[str, float] = {}
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        name = str(pattern_of(expert))
        shares[name] = shares.get(name, 0.0) + count / int(counts.sum())
    return shares


def refusal_of(judgements: Sequence[Judgement]) -> str | None:
    """Why no round's inputs could be certified; None where one's could, or none's were meant to."""
    facts = [one.certificate for one in judgements if one.certificate]
    return next((one.refusal for one in facts if one.refusal), None)


def exact_note(facts: CertificateFacts | None, stage: Stage) -> str:
    """What exact mode adds to what a stage's comparison would have shown."""
    if facts is None or facts.refusal is not None or stage not in facts.stages:
        return ""
    share = facts.stages[stage]
    return (
        f"; exact: half a bf16 ulp in any of the {share.certified - share.void:.1%} of cells that "
        "are certified and not void"
    )

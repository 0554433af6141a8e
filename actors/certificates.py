"""What a result says of exact mode: its certificate, a refusal, what it could have seen."""

from collections.abc import Iterator, Sequence
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
    found = list(_certified(judgements))
    if not found:
        return None
    number, facts = next((one for one in found if one[1].refusal), found[0])
    return Certificate(
        stages=[
            CertifiedStage(stage=stage, certified=share.certified, void=share.void)
            for stage, share in facts.stages.items()
        ],
        sums=[_sum(reduction) for reduction in facts.reductions],
        round=number,
        least_condition=facts.least,
        least_share=facts.least_share,
        same_topology_only=facts.same_topology_only,
        patterns=_patterns(judgements[number].same_recipe.topk_ids),
        accumulator_bits={
            "in block": facts.widths.in_block,
            "across blocks": facts.widths.across_blocks,
        },
        accumulator_bits_are="measured" if facts.widths.is_measured else "declared",
        smallest_relative_effect=BF16_ROUNDOFF,
        refusal=facts.refusal,
    )


def _certified(judgements: Sequence[Judgement]) -> Iterator[tuple[int, CertificateFacts]]:
    """Rounds that have a certificate."""
    for number, one in enumerate(judgements):
        if one.certificate is not None:
            yield number, one.certificate


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


def unfit_to_judge(judgements: Sequence[Judgement]) -> str | None:
    """What keeps exact mode from judging at all: certificate and golden differ; None: nothing."""
    facts = (one for _, one in _certified(judgements))
    return next((one.disagreement for one in facts if one.disagreement), None)


def refusals_of(judgements: Sequence[Judgement]) -> list[str]:
    """Rounds whose inputs could not be certified, with the reason."""
    return [
        f"round {number} ({facts.refusal})"
        for number, facts in _certified(judgements)
        if facts.refusal
    ]


def exact_note(facts: CertificateFacts | None, stage: Stage) -> str:
    """What exact mode adds to what a stage's comparison would have shown."""
    if facts is None or facts.refusal or facts.disagreement or stage not in facts.stages:
        return ""
    share = facts.stages[stage]
    codes, values = "another code or scale", "half a bf16 ulp"
    effect = codes if share.coded == 1 else f"{values}, or {codes}," if share.coded else values
    return (
        f"; exact: {effect} in any of the {share.certified - share.void:.1%} of cells that "
        "are certified and not void"
    )

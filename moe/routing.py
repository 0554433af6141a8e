"""Router logits to routes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import ScoringFunc
from moe.stages import LogicalIds, TopKOutput

NAN_RANKS_LAST = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How scores become routes.

    ``routed_scaling_factor`` has no place here: with DeepGEMM it acts after the experts.
    """

    top_k: int
    scoring_func: ScoringFunc
    renormalize: bool


def sqrtsoftplus(logits: Tensor) -> Tensor:
    """``sqrt(log(1 + exp(x)))`` in fp32 with a compensated log1p, finite for every finite logit.

    Source: SGLang 0.5.21, fused MoE gate of DeepSeek V4.
    """
    z = torch.exp(-logits.abs())
    u = 1 + z
    log1p = torch.where(u == 1, z, z * torch.log(u) / (u - 1))
    return torch.sqrt(logits.clamp_min(0) + log1p)


def select_experts(logits: Tensor, correction_bias: Tensor | None, rule: RoutingRule) -> TopKOutput:
    """Pick the top-k experts of every token.

    The bias takes part in the choice only; weights are the bias-free scores. Ties go to the
    lowest expert id, NaN logits rank last, slots stand in descending order of the biased score.

    Args:
        logits: [T, E] fp32.
        correction_bias: [E] fp32, or None.
        rule: top-k and normalisation.

    Returns:
        ids [T, K] int32, weights [T, K] fp32 and the logits they came from.

    Raises:
        ValueError: a scoring function other than sqrtsoftplus.

    Source: SGLang 0.5.21, TopK with use_grouped_topk=False.
    """
    if rule.scoring_func is not ScoringFunc.SQRTSOFTPLUS:
        raise ValueError(f"router scores are {ScoringFunc.SQRTSOFTPLUS}, not {rule.scoring_func}")
    scores = sqrtsoftplus(logits)
    ranked = scores if correction_bias is None else scores + correction_bias
    ranked = ranked.masked_fill(logits.isnan(), NAN_RANKS_LAST)
    ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(-1, ids)
    if rule.renormalize:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return TopKOutput(logits=logits, topk_ids=LogicalIds(ids.to(torch.int32)), topk_weights=weights)

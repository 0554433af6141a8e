"""The router in float64: scores, the choice of experts, and the weights of given routes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import ScoringFunc


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRouting:
    """The router's rule, in plain values.

    Attributes:
        top_k: routed experts a token.
        scoring_func: how a logit becomes a score.
        renormalize: divide the routed weights by their sum; hashed layers do so whatever it says.
        n_group: equal groups that the experts fall into.
        topk_group: groups that a token's experts may come from.
        deepseek_v41: sqrtsoftplus is ``sqrt(x)`` above 20, and a NaN ranks first, not last.
        hashed: experts come from a table over token ids.
        num_fused_shared: slots behind the routed ones that hold experts E, E + 1, ...
        routed_scaling_factor: divides those slots' weights; no routed weight contains it.
    """

    top_k: int
    scoring_func: ScoringFunc
    renormalize: bool
    n_group: int = 1
    topk_group: int = 1
    deepseek_v41: bool = False
    hashed: bool = False
    num_fused_shared: int = 0
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routes:
    """Which experts each token goes to, and what decided it.

    S is the number of fused shared slots, G the number of groups.

    ids           [T, K + S] int64    experts in descending order of rank value, then the shared
    weights       [T, K + S] float64  without the correction bias and the routed scaling factor
    ranked        [T, E] float64  score + bias; NaN as the rule ranks it; outside the groups in
                                  use -inf, or 0 where there is no bias; a hashed layer's scores
    group_scores  [T, G] float64  what groups were chosen by; None without groups
    """

    ids: Tensor
    weights: Tensor
    ranked: Tensor
    group_scores: Tensor | None = None


def _root_of_softplus(logits: Tensor) -> Tensor:
    softplus = logits.clamp(min=0.0) + torch.log1p(torch.exp(-logits.abs()))
    return softplus.sqrt()


def _logistic(logits: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-logits))


def _share_of_all(logits: Tensor) -> Tensor:
    terms = torch.exp(logits - logits.amax(dim=1, keepdim=True))
    return terms / terms.sum(dim=1, keepdim=True)


_SCORES: Final[Mapping[ScoringFunc, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        ScoringFunc.SQRTSOFTPLUS: _root_of_softplus,
        ScoringFunc.SIGMOID: _logistic,
        ScoringFunc.SOFTMAX: _share_of_all,
    }
)


def router_scores(logits: Tensor, routing: GoldenRouting) -> Tensor:
    """Scores of [T, E] float64 logits; NaN stays NaN, and under softmax takes its row along.

    Source: SGLang 0.5.21, srt/layers/moe/topk.py::TopK.
    """
    scores = _SCORES[routing.scoring_func](logits)
    return torch.where(logits > 20.0, logits.sqrt(), scores) if routing.deepseek_v41 else scores


def select_experts(
    logits: Tensor,
    bias: Tensor | None,
    routing: GoldenRouting,
    *,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    groups_in_use: Tensor | None = None,
) -> Routes:
    """Choose each token's experts by score + bias or by table, weigh them by score.

    Ties go to the lowest expert and the lowest group. A group counts by the sum of its two
    highest rank values, or without a bias by its highest.

    Args:
        logits: [T, E] float64.
        bias: [E] float64 correction, or None.
        routing: the rule.
        input_ids: [T] integers, for a hashed layer.
        tid2eid: [V, K] integers, the experts of each token id, for a hashed layer.
        groups_in_use: [T, G] bool, groups to choose from; None: the best ``topk_group``.

    Raises:
        ValueError: top_k exceeds the experts to choose from, or a hashed layer has no table.

    Source: SGLang 0.5.21, srt/layers/moe/topk.py::TopK, biased_grouped_topk; HashTopK.
    """
    scores = router_scores(logits, routing)
    if not routing.hashed:
        return _by_rank(scores, bias, routing, groups_in_use)
    if input_ids is None or tid2eid is None:
        raise ValueError("a hashed layer's experts come from input_ids and tid2eid")
    listed = tid2eid[input_ids.to(torch.int64)].to(torch.int64)
    ids = _with_shared(listed, logits.shape[1], routing)
    return Routes(ids=ids, weights=route_weights(scores, ids, routing), ranked=scores)


def _by_rank(
    scores: Tensor, bias: Tensor | None, routing: GoldenRouting, groups_in_use: Tensor | None
) -> Routes:
    num_experts = scores.shape[1]
    eligible = num_experts * routing.topk_group // routing.n_group
    if routing.top_k > eligible:
        raise ValueError(
            f"top_k ({routing.top_k}) must not exceed the number of experts ({eligible})"
        )
    ranked = scores if bias is None else scores + bias
    ranked = ranked.masked_fill(ranked.isnan(), torch.inf if routing.deepseek_v41 else -1e30)
    group_scores = None
    if routing.n_group > 1:
        group_scores = _group_scores(ranked, routing.n_group, best=1 if bias is None else 2)
        if groups_in_use is None:
            groups_in_use = _highest(group_scores, routing.topk_group)
        inside = groups_in_use.repeat_interleave(num_experts // routing.n_group, dim=1)
        ranked = torch.where(inside, ranked, 0.0 if bias is None else -torch.inf)
        scores = torch.where(inside, scores, 0.0) if bias is None else scores
    ids = ranked.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    ids = _with_shared(ids, num_experts, routing)
    weights = route_weights(scores, ids, routing)
    return Routes(ids=ids, weights=weights, ranked=ranked, group_scores=group_scores)


def _group_scores(ranked: Tensor, num_groups: int, best: int) -> Tensor:
    """[T, G]: the sum of each group's ``best`` highest values."""
    in_groups = ranked.reshape(ranked.shape[0], num_groups, ranked.shape[1] // num_groups)
    return in_groups.sort(dim=2, descending=True).values[:, :, :best].sum(dim=2)


def _highest(values: Tensor, count: int) -> Tensor:
    """[T, N] bool: the ``count`` highest of each row, the leftmost of equal ones."""
    place = values.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
    return place < count


def _with_shared(ids: Tensor, num_experts: int, routing: GoldenRouting) -> Tensor:
    shared = torch.arange(routing.num_fused_shared, device=ids.device) + num_experts
    return torch.cat([ids, shared.repeat(ids.shape[0], 1)], dim=1)


def route_weights(scores: Tensor, ids: Tensor, routing: GoldenRouting) -> Tensor:
    """Weights of given routes.

    A routed weight is its expert's score, over the sum of the routed scores where the rule
    renormalises: sqrtsoftplus and softmax leave a sum of zero alone, sigmoid and hashed layers
    add 1e-20 to every sum. A shared slot weighs 1 / routed_scaling_factor of that sum, and in a
    hashed layer exactly that.

    Args:
        scores: [T, E] float64.
        ids: [T, K + S] int64, the shared slots last; -1 = dropped, of weight 0.
        routing: the rule.

    Returns:
        [T, K + S] float64.

    Source: SGLang 0.5.21, srt/layers/moe/topk.py::TopK, biased_grouped_topk; HashTopK.
    """
    routed = ids[:, : routing.top_k]
    weights = scores.gather(1, routed.clamp(min=0)).masked_fill(routed < 0, 0.0)
    total = weights.sum(dim=1, keepdim=True)
    divisor = _divisor(total, routing)
    routed_sum = torch.ones_like(total) if routing.hashed else total / divisor
    shared = routed_sum.expand(-1, routing.num_fused_shared) / routing.routed_scaling_factor
    shared = shared.masked_fill(ids[:, routing.top_k :] < 0, 0.0)
    return torch.cat([weights / divisor, shared], dim=1)


def _divisor(total: Tensor, routing: GoldenRouting) -> Tensor:
    """[T, 1]: what the scores are divided by."""
    if routing.hashed or (routing.renormalize and routing.scoring_func is ScoringFunc.SIGMOID):
        return total + 1e-20
    return torch.where(total > 0, total, 1.0) if routing.renormalize else torch.ones_like(total)

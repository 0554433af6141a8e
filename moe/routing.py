"""Router logits to routes: a score each expert, a choice of experts, their weights, all in fp32."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from moe.formats import ScoringFunc
from moe.sigmoid import sigmoid
from moe.stages import LogicalIds, TopKOutput

NAN_RANKS_LAST = -1e30
NAN_RANKS_FIRST = torch.inf
RENORM_EPSILON = 1e-20
SOFTPLUS_THRESHOLD = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How scores become routes.

    Attributes:
        top_k: routed experts a token.
        scoring_func: how a logit becomes a score.
        renormalize: divide a token's weights by their sum; a hashed layer always does.
        n_group: equal groups of experts; a token's experts come from ``topk_group`` of them.
        topk_group: groups a token may choose from.
        deepseek_v41: the V4.1 form of sqrtsoftplus: linear above 20, and NaN ranks first.
        hashed: a table over token ids chooses the experts, the scores only weigh them.
        num_fused_shared: slots after the routed ones, for shared experts ``E``, ``E + 1``, ...
        routed_scaling_factor: acts after the experts; here it only divides the shared slots'
            weights, so that the later product gives them weight 1.

    Raises:
        ValueError: more groups to choose than there are, or a variant of sqrtsoftplus asked of
            another scoring function.
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

    def __post_init__(self) -> None:
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(f"topk_group ({self.topk_group}) must be 1 to n_group {self.n_group}")
        if self.scoring_func is not ScoringFunc.SQRTSOFTPLUS and (self.hashed or self.deepseek_v41):
            variant = "a hashed layer" if self.hashed else "DeepSeek V4.1"
            raise ValueError(f"{variant} scores by sqrtsoftplus, not {self.scoring_func}")

    @property
    def num_slots(self) -> int:
        """Columns of the ids and weights: routed and fused shared slots."""
        return self.top_k + self.num_fused_shared


def sqrtsoftplus(logits: Tensor) -> Tensor:
    """``sqrt(log(1 + exp(x)))`` in fp32 with a compensated log1p, finite for every finite logit.

    Source: SGLang 0.5.21, fused MoE gate of DeepSeek V4.
    """
    z = torch.exp(-logits.abs())
    u = 1 + z
    log1p = torch.where(u == 1, z, z * torch.log(u) / (u - 1))
    return torch.sqrt(logits.clamp_min(0) + log1p)


def sqrtsoftplus_v41(logits: Tensor) -> Tensor:
    """``sqrt(log1p(exp(x)))``, and ``sqrt(x)`` above 20, in fp32.

    Source: SGLang 0.5.21, fused MoE gate, model_type deepseek_v41.
    """
    softplus = torch.log1p(torch.exp(logits))
    return torch.sqrt(torch.where(logits > SOFTPLUS_THRESHOLD, logits, softplus))


def sqrtsoftplus_of_hash(logits: Tensor) -> Tensor:
    """``sqrt(max(x, 0) + log1p(exp(-|x|)))`` in fp32.

    Source: SGLang 0.5.21, HashTopK, its CUDA kernel.
    """
    return torch.sqrt(logits.clamp_min(0) + torch.log1p(torch.exp(-logits.abs())))


def softmax(logits: Tensor) -> Tensor:
    """Softmax over all experts, before any choice: [T, E] fp32."""
    return torch.softmax(logits, dim=-1)


def positive_total(weights: Tensor) -> Tensor:
    """[T, K] to [T, 1]: the sum where it is positive, else 1."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, total, 1.0)


def total_with_epsilon(weights: Tensor) -> Tensor:
    """[T, K] to [T, 1]: the sum plus 1e-20, so that scores that vanish give zeros, not NaN."""
    return weights.sum(-1, keepdim=True) + RENORM_EPSILON


class _Family(NamedTuple):
    """score: [T, E] to [T, E]; denominator: chosen [T, K] to what renormalising divides by."""

    score: Callable[[Tensor], Tensor]
    denominator: Callable[[Tensor], Tensor]


_FAMILIES: Final[Mapping[ScoringFunc, _Family]] = MappingProxyType(
    {
        ScoringFunc.SQRTSOFTPLUS: _Family(sqrtsoftplus, positive_total),
        ScoringFunc.SIGMOID: _Family(sigmoid, total_with_epsilon),
        ScoringFunc.SOFTMAX: _Family(softmax, positive_total),
    }
)
_DEEPSEEK_V41: Final = _Family(sqrtsoftplus_v41, positive_total)
_HASHED: Final = _Family(sqrtsoftplus_of_hash, total_with_epsilon)


def _family(rule: RoutingRule) -> _Family:
    if rule.hashed:
        return _HASHED
    return _DEEPSEEK_V41 if rule.deepseek_v41 else _FAMILIES[rule.scoring_func]


def select_experts(
    logits: Tensor,
    correction_bias: Tensor | None,
    rule: RoutingRule,
    *,
    is_padding: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
) -> TopKOutput:
    """Pick the experts of every token.

    The bias takes part in the choice only; weights are the bias-free scores. Ties go to the
    lowest expert id (and group), slots stand in descending order of the biased score. A hashed
    layer keeps the order of its table. Routes of padding rows are dropped: id -1, and weight 0
    except in a hashed layer, which keeps the weight.

    Args:
        logits: [T, E] fp32.
        correction_bias: [E] fp32, or None.
        rule: the choice and its weights.
        is_padding: [T] bool, rows that are no token; None: all are tokens.
        input_ids: [T] int64 vocabulary ids, for a hashed layer.
        tid2eid: [V, K] integer experts of each vocabulary id, for a hashed layer.

    Returns:
        ids [T, K + S] int32, weights [T, K + S] fp32 and the logits they came from, S being the
        fused shared slots.

    Raises:
        ValueError: the rule does not fit the number of experts, or a hashed layer has no table or
            a narrower one, no ids, or an id outside its table.

    Source: SGLang 0.5.21, srt/layers/moe/topk.py::TopK and biased_grouped_topk; HashTopK.
    """
    if rule.hashed:
        ids, weights = _hash_routes(logits, rule, input_ids, tid2eid)
    else:
        ids, weights = _ranked_routes(logits, correction_bias, rule)
    if is_padding is not None:
        ids = ids.masked_fill(is_padding[:, None], -1)
        weights = weights if rule.hashed else weights.masked_fill(is_padding[:, None], 0.0)
    return TopKOutput(logits=logits, topk_ids=LogicalIds(ids.to(torch.int32)), topk_weights=weights)


def weights_at(logits: Tensor, topk_ids: Tensor, rule: RoutingRule) -> Tensor:
    """Weights of given routes, fused shared slots apart.

    Args:
        logits: [T, E] fp32.
        topk_ids: [T, K] integer experts, -1 = dropped, of weight 0 and no part of the sum.
        rule: scores and normalisation; groups have no say.

    Returns:
        [T, K] fp32.
    """
    score, denominator = _family(rule)
    chosen = topk_ids.clamp(min=0).to(torch.int64)
    weights = score(logits).gather(-1, chosen).masked_fill(topk_ids < 0, 0.0)
    return weights / denominator(weights) if rule.renormalize or rule.hashed else weights


def _ranked_routes(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """Ids [T, K + S] int64 and weights [T, K + S] of the highest ranked experts."""
    _check_sizes(logits.shape[1], rule, biased=bias is not None)
    score, denominator = _family(rule)
    scores = score(logits)
    ranked = scores if bias is None else scores + bias
    nan_rank = NAN_RANKS_FIRST if rule.deepseek_v41 else NAN_RANKS_LAST
    ranked = ranked.masked_fill(ranked.isnan(), nan_rank)
    if rule.n_group > 1:
        outside = _outside_the_chosen_groups(ranked, rule, biased=bias is not None)
        if bias is None:
            ranked, scores = ranked.masked_fill(outside, 0.0), scores.masked_fill(outside, 0.0)
        else:
            ranked = ranked.masked_fill(outside, -torch.inf)
    ids = _first(ranked, rule.top_k)
    weights = scores.gather(-1, ids)
    if rule.num_fused_shared:
        shared = weights.sum(-1, keepdim=True) / rule.routed_scaling_factor
        ids, weights = _with_shared_slots(ids, weights, shared, logits.shape[1], rule)
    if rule.renormalize:
        weights = weights / denominator(weights[:, : rule.top_k])
    return ids, weights


def _outside_the_chosen_groups(ranked: Tensor, rule: RoutingRule, *, biased: bool) -> Tensor:
    """[T, E] bool: experts of the groups that a token may not choose from.

    With a bias a group counts by the sum of its two best, without one by its best.
    """
    grouped = ranked.view(ranked.shape[0], rule.n_group, ranked.shape[1] // rule.n_group)
    group_scores = grouped.topk(2, dim=-1).values.sum(-1) if biased else grouped.amax(-1)
    outside = torch.ones_like(group_scores, dtype=torch.bool)
    outside.scatter_(-1, _first(group_scores, rule.topk_group), False)
    return outside.repeat_interleave(grouped.shape[-1], dim=-1)


def _first(ranked: Tensor, count: int) -> Tensor:
    """Columns of the ``count`` highest values, descending, ties to the lowest column."""
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :count]


def _hash_routes(
    logits: Tensor, rule: RoutingRule, input_ids: Tensor | None, tid2eid: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Ids [T, K + S] int64 as the table lists them, and their weights, always renormalised."""
    if input_ids is None or tid2eid is None:
        raise ValueError("a hashed layer needs input_ids and tid2eid")
    if tid2eid.shape[1] != rule.top_k:
        raise ValueError(f"tid2eid lists {tid2eid.shape[1]} experts an id, top_k is {rule.top_k}")
    unknown = (input_ids < 0) | (input_ids >= tid2eid.shape[0])
    if bool(unknown.any()):
        row = int(unknown.nonzero()[0])
        raise ValueError(
            f"row {row} has input id {int(input_ids[row])}; tid2eid has {tid2eid.shape[0]} ids"
        )
    ids = tid2eid[input_ids].to(torch.int64)
    weights = weights_at(logits, ids, rule)
    if rule.num_fused_shared:
        shared = torch.full_like(weights[:, :1], 1 / rule.routed_scaling_factor)
        ids, weights = _with_shared_slots(ids, weights, shared, logits.shape[1], rule)
    return ids, weights


def _with_shared_slots(
    ids: Tensor, weights: Tensor, shared: Tensor, num_experts: int, rule: RoutingRule
) -> tuple[Tensor, Tensor]:
    """The routes with one more slot for each fused shared expert, of weight ``shared`` [T, 1]."""
    fused = rule.num_fused_shared
    shared_ids = torch.arange(num_experts, num_experts + fused, device=ids.device)
    ids = torch.cat([ids, shared_ids.expand(ids.shape[0], fused)], dim=1)
    return ids, torch.cat([weights, shared.expand(-1, fused)], dim=1)


def _check_sizes(num_experts: int, rule: RoutingRule, *, biased: bool) -> None:
    group_size, rest = divmod(num_experts, rule.n_group)
    if rest:
        raise ValueError(f"{num_experts} experts do not divide into {rule.n_group} groups")
    if rule.n_group > 1 and biased and group_size < 2:
        raise ValueError(f"a group is scored by its best two experts and has {group_size}")
    if rule.top_k > rule.topk_group * group_size:
        raise ValueError(
            f"top_k ({rule.top_k}) must not exceed the {rule.topk_group * group_size} experts "
            f"of {rule.topk_group} group(s)"
        )

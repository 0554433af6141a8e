"""Faults of the router: which experts, with which weights, for which rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.faults.bits import same_bits
from moe.faults.kinds import FaultContext, Params, Plan, plan_fault, value_fault
from moe.formats import ScoringFunc, Stage
from moe.routing import RoutingRule, weights_at
from moe.stages import LogicalIds, TopKOutput
from topology.sync import PADDING


def weights_from_biased_scores(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Mixing weights gathered from score + bias; normalised, where they are, their sum is one."""
    bias, rule = _bias(context), ranking_rule(topk, context)
    if bias is None or rule is None:
        return topk
    raw = weights_at(topk.logits, topk.topk_ids, replace(rule, renormalize=False))
    dropped = topk.topk_ids < 0
    biased = (raw + bias[topk.topk_ids.clamp(min=0).to(torch.int64)]).masked_fill(dropped, 0.0)
    if rule.renormalize:
        total = biased.sum(-1, keepdim=True)
        biased = biased / torch.where(total == 0, 1.0, total)
    return replace(topk, topk_weights=biased)


def group_scored_by_best(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Groups of experts are ranked by their best expert, not by the sum of the two best."""
    groups, chosen = int(context.params["n_group"]), int(context.params["topk_group"])
    num_experts = topk.logits.shape[1]
    if _bias(context) is None or not 1 <= chosen <= groups or num_experts % groups:
        return topk
    ranked = ranked_scores(topk, context)
    right, wrong = (_inside_best_groups(ranked, groups, chosen, best=n) for n in (2, 1))
    return _chosen_instead(topk, context, right=right, order=_lowest_ids_first(wrong))


def masked_groups_score_zero(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Experts outside the chosen groups count as 0, and win against negative ones inside."""
    groups, chosen = int(context.params["n_group"]), int(context.params["topk_group"])
    if not 1 <= chosen <= groups or topk.logits.shape[1] % groups:
        return topk
    right = _inside_best_groups(ranked_scores(topk, context), groups, chosen, best=2)
    wrong = right.masked_fill(right == -torch.inf, 0.0)
    return _chosen_instead(topk, context, right=right, order=_lowest_ids_first(wrong))


def ties_to_highest_id(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Of equally ranked experts the last one goes first. Grouped routing is left alone."""
    ranked = ranked_scores(topk, context)
    from_behind = ranked.shape[1] - 1 - _lowest_ids_first(ranked.flip(-1))
    return _chosen_instead(topk, context, right=ranked, order=from_behind)


def maximum_starts_at_zero(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """A running maximum begins at 0 with expert 0: experts ranked below it never win."""
    rule = ranking_rule(topk, context)
    if rule is None:
        return topk
    ids = topk.topk_ids.clamp(min=0).to(torch.int64)
    loses = (ranked_scores(topk, context).gather(-1, ids) < 0) & (topk.topk_ids >= 0)
    return _with_ids(topk, topk.topk_ids.masked_fill(loses, 0), rule)


def masked_by_local_count(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """The rank's own number of rows is taken for that of the gathered rows: the rest is masked."""
    own = context.seen[Stage.GLUE_IN].own.shape[0]
    ids, weights = topk.topk_ids.clone(), topk.topk_weights.clone()
    ids[own:], weights[own:] = -1, 0.0
    return replace(topk, topk_ids=LogicalIds(ids), topk_weights=weights)


def renormalization_flipped(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Top-k weights divided by their sum where the model does not, or not where it does."""
    rule = ranking_rule(topk, context)
    if rule is None:
        return topk
    return _with_ids(topk, topk.topk_ids, replace(rule, renormalize=not rule.renormalize))


def expert_groups_ignored(plan: Plan, params: Params, rank: int) -> Plan:
    """Every group of experts is a candidate for every token."""
    return replace(plan, routing=replace(plan.routing, topk_group=plan.routing.n_group))


def padding_rows_routed(plan: Plan, params: Params, rank: int) -> Plan:
    """Padding rows that should keep out of routing are routed as tokens are."""
    if PADDING not in plan.sync.layer[rank]:
        return plan
    return replace(plan, sync=replace(plan.sync, masks_padding=False))


def ranking_rule(topk: TopKOutput, context: FaultContext) -> RoutingRule | None:
    """The rule of a layer whose scores choose its experts; None for a hashed one."""
    return None if context.seen[Stage.WEIGHTS].tid2eid is not None else rule_behind(topk)


def rule_behind(topk: TopKOutput) -> RoutingRule | None:
    """The scores and normalisation that these weights came from; None for weights from elsewhere.

    A tap is not told the rule, but only one gives the weights bit for bit. They are computed for
    all rows together, as they were: a vectorised function may round the last few otherwise.
    """
    logits, ids = topk.logits, topk.topk_ids
    whole = (ids >= 0).all(dim=1)
    if not bool(whole.any()):
        return None
    wanted = topk.topk_weights[whole]
    rules = _rules(ids.shape[1])
    return next((r for r in rules if same_bits(weights_at(logits, ids, r)[whole], wanted)), None)


def _rules(top_k: int) -> Iterator[RoutingRule]:
    for scoring_func in ScoringFunc:
        for renormalize in (True, False):
            rule = RoutingRule(top_k=top_k, scoring_func=scoring_func, renormalize=renormalize)
            yield rule
            if scoring_func is ScoringFunc.SQRTSOFTPLUS:
                yield replace(rule, deepseek_v41=True)


def _bias(context: FaultContext) -> Tensor | None:
    bias: Tensor | None = context.seen[Stage.WEIGHTS].correction_bias
    return bias


def ranked_scores(topk: TopKOutput, context: FaultContext) -> Tensor:
    """[T, E] score + bias; the logits' own order where the scores are not known."""
    rule, bias = ranking_rule(topk, context), _bias(context)
    if rule is None:
        return topk.logits
    every = torch.arange(topk.logits.shape[1]).expand_as(topk.logits)
    scores = weights_at(topk.logits, every, replace(rule, renormalize=False))
    return scores if bias is None else scores + bias


def _lowest_ids_first(ranked: Tensor) -> Tensor:
    """[..., N] columns in descending order of their values, of equal ones the lowest first."""
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices


def _inside_best_groups(ranked: Tensor, groups: int, chosen: int, *, best: int) -> Tensor:
    """[T, E] ranked scores, -inf outside the groups with the highest sum of their ``best``."""
    grouped = ranked.view(len(ranked), groups, ranked.shape[-1] // groups)
    scores = grouped.topk(min(best, grouped.shape[-1]), dim=-1).values.sum(-1)
    inside = torch.zeros_like(scores, dtype=torch.bool)
    inside.scatter_(-1, _lowest_ids_first(scores)[:, :chosen], True)
    return ranked.masked_fill(~inside.repeat_interleave(grouped.shape[-1], -1), -torch.inf)


def _chosen_instead(
    topk: TopKOutput, context: FaultContext, *, right: Tensor, order: Tensor
) -> TopKOutput:
    """The first experts of ``order`` [T, E], if ``right`` [T, E] ranks those in use first."""
    rule, top_k = ranking_rule(topk, context), topk.topk_ids.shape[1]
    kept_out = topk.topk_ids < 0
    due = _lowest_ids_first(right)[:, :top_k].masked_fill(kept_out, -1)
    if rule is None or not torch.equal(due, topk.topk_ids.to(torch.int64)):
        return topk
    return _with_ids(topk, order[:, :top_k].masked_fill(kept_out, -1), rule)


def _with_ids(topk: TopKOutput, ids: Tensor, rule: RoutingRule) -> TopKOutput:
    """These routes with the weights that belong to them."""
    return replace(
        topk,
        topk_ids=LogicalIds(ids.to(torch.int32)),
        topk_weights=weights_at(topk.logits, ids, rule),
    )


ROUTING_FAULTS: Final = (
    value_fault(
        Stage.ROUTE,
        weights_from_biased_scores,
        "mixing weights taken from score + bias",
        "huggingface/transformers#41647",
    ),
    value_fault(
        Stage.ROUTE,
        group_scored_by_best,
        "groups of experts ranked by their best expert, not by their two best",
        "vllm-project/vllm#13474",
        n_group=8,
        topk_group=4,
    ),
    value_fault(
        Stage.ROUTE,
        masked_groups_score_zero,
        "experts outside the chosen groups count as 0, where they are due to lose to all",
        "vllm-project/vllm#13474",
        n_group=8,
        topk_group=4,
    ),
    value_fault(
        Stage.ROUTE,
        ties_to_highest_id,
        "of equally ranked experts the highest id chosen",
        "vllm-project/vllm#55514",
    ),
    value_fault(
        Stage.ROUTE,
        maximum_starts_at_zero,
        "experts with a negative score + bias lose to expert 0",
        "flashinfer-ai/flashinfer#1347",
    ),
    value_fault(
        Stage.ROUTE,
        masked_by_local_count,
        "gathered rows behind the rank's own number of rows masked",
        "sgl-project/sglang#40643",
    ),
    value_fault(
        Stage.ROUTE,
        renormalization_flipped,
        "top-k weights normalised where the model does not, or the reverse",
        "NVIDIA/Megatron-LM#955",
    ),
    plan_fault(
        Stage.ROUTE,
        expert_groups_ignored,
        "experts chosen from all groups, not from the best ones",
        "flashinfer-ai/flashinfer#1723",
    ),
    plan_fault(
        Stage.ROUTE,
        padding_rows_routed,
        "padding rows routed that should keep out",
        "vllm-project/vllm#56079",
    ),
)

"""Faults of single rows of the router: marks, guards and tables that go wrong at the edge."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext, value_fault
from moe.faults.routing import ranked_scores, ranking_rule
from moe.formats import ScoringFunc, Stage
from moe.routing import RoutingRule, weights_at
from moe.stages import LogicalIds, TopKOutput


def scaling_factor_in_router(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Top-k weights hold a factor that acts once more behind the experts."""
    return replace(topk, topk_weights=topk.topk_weights * float(context.params["factor"]))


def renormalized_without_guard(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Weights of rows without a route are 0 divided by their sum, 0."""
    rule = ranking_rule(topk, context)
    if rule is None or not rule.renormalize:
        return topk
    total = topk.topk_weights.sum(-1, keepdim=True)
    return replace(topk, topk_weights=torch.where(total == 0, torch.nan, topk.topk_weights))


def nan_scores(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """One row's logits are no numbers, and no expert ever wins: the initial -1 stays."""
    at = _row(topk, context)
    return _with_row(
        replace(topk, logits=_with(topk.logits, at, torch.nan)),
        at,
        torch.full_like(topk.topk_ids[at], -1),
        torch.full_like(topk.topk_weights[at], torch.nan),
    )


def expert_chosen_twice(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """The second slot of one row repeats the expert of the first."""
    at, top_k = _row(topk, context), topk.topk_ids.shape[1]
    slots = [0, 0, *range(2, top_k)][:top_k]
    return _with_row(topk, at, topk.topk_ids[at][:, slots], topk.topk_weights[at])


def hash_of_next_entry(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """One row's experts come from the entry behind its own in the table over token ids."""
    table: Tensor | None = context.seen[Stage.WEIGHTS].tid2eid
    if table is None:
        return topk
    at, num_ids = _row(topk, context), len(table)
    token = context.seen[Stage.GLUE_IN].input_ids[at]
    is_masked = topk.topk_ids[at] < 0
    ids = table[(token + 1) % num_ids].to(torch.int32).masked_fill(is_masked, -1)
    rule = RoutingRule(
        top_k=ids.shape[1], scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=True, hashed=True
    )
    return _with_row(topk, at, ids, weights_at(topk.logits[at], ids, rule))


def padding_mask_rolled(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """The mask of rows without routes is one row late: a token is masked, and padding routed."""
    rule = ranking_rule(topk, context)
    is_masked = (topk.topk_ids < 0).all(dim=1)
    late = is_masked.roll(1)
    if rule is None or torch.equal(late, is_masked):
        return topk
    best = ranked_scores(topk, context).argsort(dim=-1, descending=True, stable=True)
    chosen = best[:, : topk.topk_ids.shape[1]].to(torch.int32)
    ids = torch.where(is_masked[:, None], chosen, topk.topk_ids).masked_fill(late[:, None], -1)
    weights = torch.where(
        is_masked[:, None], weights_at(topk.logits, chosen, rule), topk.topk_weights
    ).masked_fill(late[:, None], 0.0)
    return replace(topk, topk_ids=LogicalIds(ids), topk_weights=weights)


def _row(topk: TopKOutput, context: FaultContext) -> Tensor:
    """[1] int64, the row that is meant; [0] where there is none."""
    num_rows = len(topk.topk_ids)
    return torch.arange(num_rows)[[int(context.params["row"]) % num_rows] if num_rows else []]


def _with(rows: Tensor, at: Tensor, values: Tensor | float) -> Tensor:
    changed = rows.clone()
    changed[at] = values
    return changed


def _with_row(topk: TopKOutput, at: Tensor, ids: Tensor, weights: Tensor) -> TopKOutput:
    return replace(
        topk,
        topk_ids=LogicalIds(_with(topk.topk_ids, at, ids)),
        topk_weights=_with(topk.topk_weights, at, weights),
    )


ROUTER_SLIP_FAULTS: Final = (
    value_fault(
        Stage.ROUTE,
        scaling_factor_in_router,
        "top-k weights multiplied by a factor that acts behind the experts, too",
        "vllm-project/vllm#45037",
        factor=1.5,
    ),
    value_fault(
        Stage.ROUTE,
        renormalized_without_guard,
        "weights that sum to 0 normalised without a guard",
        "flashinfer-ai/flashinfer#3803",
        rank="all",
    ),
    value_fault(
        Stage.ROUTE,
        nan_scores,
        "no expert wins a row whose scores are no numbers: its ids stay -1",
        "flashinfer-ai/flashinfer#1347",
        row=0,
    ),
    value_fault(
        Stage.ROUTE,
        expert_chosen_twice,
        "the second slot of one row repeats the expert of the first",
        "our own reading of top-k: the experts of a token are distinct",
        row=0,
    ),
    value_fault(
        Stage.ROUTE,
        hash_of_next_entry,
        "experts of one token read from a hash table's wrong entry",
        "vllm-project/vllm#50844",
        row=0,
    ),
    value_fault(
        Stage.ROUTE,
        padding_mask_rolled,
        "the mask of padding rows rolled by one row too many",
        "NVIDIA/Megatron-LM#5011",
        rank="all",
    ),
)

"""Faults of the way back: which of a token's routes are added up, with which weights, and where."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.dispatched import DeepEpV2DispatchOutput, StandardDispatchOutput
from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import FOLDS_THE_FACTOR
from moe.fold import fold_topk_weights
from moe.formats import Stage
from moe.stages import CombineInput, CombineOutput, Restore


def k_from_row0(partials: CombineInput, context: FaultContext) -> CombineInput:
    """As many routes of every row are added up as the first row has; the rest is lost.

    Only where the sum holds no other factor.
    """
    restore = context.seen[Stage.PRE_PERMUTE].restore
    has_factor = isinstance(context.seen[Stage.DISPATCH], FOLDS_THE_FACTOR)
    if has_factor or not isinstance(restore, Restore) or len(restore.topk_ids) == 0:
        return partials
    is_route = restore.topk_ids >= 0
    is_added = is_route & (is_route.cumsum(1) <= is_route[0].sum())
    if torch.equal(is_added, is_route):
        return partials
    sums = fold_topk_weights(
        context.seen[Stage.GEMM2].output, restore.output_index, restore.topk_weights, is_added
    )
    return replace(partials, partial=sums)


def combine_weights_twice(partials: CombineInput, context: FaultContext) -> CombineInput:
    """Weights that combine applies are handed on as if it had to apply each of them twice."""
    weights = partials.pending_weights
    return partials if weights is None else replace(partials, pending_weights=weights * weights)


def combine_weights_missing(partials: CombineInput, context: FaultContext) -> CombineInput:
    """Combine is handed weight 1 for every route."""
    weights = partials.pending_weights
    if weights is None:
        return partials
    return replace(partials, pending_weights=(weights != 0).to(weights.dtype))


def combine_weights_of_slot0(partials: CombineInput, context: FaultContext) -> CombineInput:
    """Combine is handed the weight of a token's first slot for every slot."""
    weights = partials.pending_weights
    if weights is None:
        return partials
    return replace(partials, pending_weights=weights[:, :1].expand_as(weights).contiguous())


def combine_offset_shifted(combined: CombineOutput, context: FaultContext) -> CombineOutput:
    """Results are read one row too early: each token gets its neighbour's, behind an all-to-all."""
    return _changed(combined, context, combined.routed.roll(1, dims=0))


def combine_rows_raced(combined: CombineOutput, context: FaultContext) -> CombineOutput:
    """Each row, with a probability, has the next row's values in its first half of the columns.

    The next load has overwritten a stage of memory while it was still being read.
    """
    num_rows, width = combined.routed.shape
    draw = torch.Generator().manual_seed(context.rank)
    drawn = torch.rand(num_rows, generator=draw, device="cpu")
    is_raced = drawn.to(combined.routed.device) < float(context.params["p"])
    routed = combined.routed.clone()
    routed[is_raced, : width // 2] = routed.roll(-1, dims=0)[is_raced, : width // 2]
    return _changed(combined, context, routed)


def hidden_tail_dropped(combined: CombineOutput, context: FaultContext) -> CombineOutput:
    """Columns past the last whole vector are left zero, behind an all-to-all."""
    width = combined.routed.shape[1]
    routed = combined.routed.clone()
    routed[:, width - width % int(context.params["vector"]) :] = 0
    return _changed(combined, context, routed)


def idle_dummy_row_kept(combined: CombineOutput, context: FaultContext) -> CombineOutput:
    """A rank without tokens keeps the row of the dummy that it had to send."""
    sent = context.seen[Stage.DISPATCH]
    if not isinstance(sent, DeepEpV2DispatchOutput) or sent.handle.num_tokens:
        return combined
    return replace(combined, routed=combined.routed.new_zeros((1, combined.routed.shape[1])))


def _changed(combined: CombineOutput, context: FaultContext, routed: Tensor) -> CombineOutput:
    """``routed`` instead, where something is combined at all."""
    if isinstance(context.seen[Stage.DISPATCH], StandardDispatchOutput):
        return combined
    return replace(combined, routed=routed)


ROUTE_BACK_FAULTS: Final = (
    value_fault(
        Stage.POST_PERMUTE,
        k_from_row0,
        "as many routes of each row summed as the first row has, behind an all-to-all",
        "NVIDIA/Megatron-LM#5231",
    ),
    value_fault(
        Stage.POST_PERMUTE,
        combine_weights_twice,
        "weights applied again by a combine that applies them (low latency)",
        "vllm-project/vllm#43694",
    ),
    value_fault(
        Stage.POST_PERMUTE,
        combine_weights_missing,
        "no weights applied by a combine that is due to apply them (low latency)",
        "our own reading of vllm-project/vllm#43694, from the other side",
    ),
    value_fault(
        Stage.POST_PERMUTE,
        combine_weights_of_slot0,
        "every slot weighted by combine as the first one (low latency)",
        "our own reading of low-latency combine",
    ),
    value_fault(
        Stage.COMBINE,
        combine_offset_shifted,
        "combined results one row off",
        "sgl-project/sglang#18129",
    ),
    value_fault(
        Stage.COMBINE,
        combine_rows_raced,
        "halves of some rows overwritten by the next row while they are read",
        "deepseek-ai/DeepEP#621",
        p=0.5,
    ),
    value_fault(
        Stage.COMBINE,
        hidden_tail_dropped,
        "columns past the last whole vector of a combined row left zero",
        "deepseek-ai/DeepEP#413",
        vector=256,
    ),
    value_fault(
        Stage.COMBINE,
        idle_dummy_row_kept,
        "the row of an idle rank's dummy not cut off (deepep_v2 extend)",
        "sgl-project/sglang#25397",
        rank="all",
    ),
)

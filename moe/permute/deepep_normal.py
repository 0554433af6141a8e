"""deepep_normal to the contiguous layout and back: both halves of one conversion."""

import torch
from torch import Tensor

from moe.fold import fold_topk_weights
from moe.indices import arrival_numbers, exclusive_psum, m_indices_from_counts
from moe.permute.context import PermuteContext
from moe.rows import spread_rows, spread_scales, take_rows
from moe.stages import (
    CombineInput,
    ContigInput,
    DeepEpNormalDispatchOutput,
    Gemm2Output,
    PrePermuteOutput,
    Restore,
)


def pre_permute(sent: DeepEpNormalDispatchOutput, context: PermuteContext) -> PrePermuteOutput:
    """Copy every received row to the segment of each of its local experts.

    Dispatch has quantised and has announced how long segments are, so the context adds nothing.
    Padding carries the expert's id and is computed on whatever lies there (poison here,
    uninitialised memory upstream).

    Source: SGLang 0.5.21, pre_permute_deepep_normal_to_deep_gemm, ep_scatter.
    """
    counts = sent.num_recv_tokens_per_expert
    output_index = scatter_index(sent.topk_ids, counts, context.slot_order_seed)
    num_rows = int(sent.num_recv_tokens_per_expert.sum())
    received, slot = (output_index >= 0).nonzero(as_tuple=True)
    places, scale = output_index[received, slot], sent.hidden_states_scale
    rows = ContigInput(
        hidden_states=spread_rows(take_rows(sent.hidden_states, received), places, num_rows),
        hidden_states_scale=None
        if scale is None
        else spread_scales(take_rows(scale, received), places, num_rows),
        m_indices=m_indices_from_counts(sent.num_recv_tokens_per_expert),
        live_rows=places.sort().values,
    )
    restore = Restore(
        topk_ids=sent.topk_ids, topk_weights=sent.topk_weights, output_index=output_index
    )
    return PrePermuteOutput(rows=rows, restore=restore)


def post_permute(output: Gemm2Output, restore: Restore, context: PermuteContext) -> CombineInput:
    """Weighted sum of a token's local routes, slots ascending, one rounding to bf16.

    The scaling factor of the context is left to the tail.

    Source: SGLang 0.5.21, post_permute_deep_gemm_to_deepep_normal, ep_gather.
    """
    return CombineInput(
        partial=fold_topk_weights(
            output.output, restore.output_index, restore.topk_weights, restore.topk_ids >= 0
        )
    )


def scatter_index(topk_ids: Tensor, rows_per_expert: Tensor, seed: int) -> Tensor:
    """Grouped row of every route, in a drawn order inside each expert's segment.

    Args:
        topk_ids: [R, K] int64 local experts; anything outside [0, L) is no route.
        rows_per_expert: [L] int64 segment lengths.
        seed: of that order.

    Returns:
        [R, K] int64, -1 where there is no route.
    """
    is_route = (topk_ids >= 0) & (topk_ids < rows_per_expert.shape[0])
    experts = topk_ids[is_route]
    output_index = torch.full_like(topk_ids, -1)
    starts = exclusive_psum(rows_per_expert)
    output_index[is_route] = starts[experts] + arrival_numbers(experts, seed)
    return output_index

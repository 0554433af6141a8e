"""deepep_normal to the contiguous layout and back: both halves of one conversion."""

import torch
from torch import Tensor

from moe.dispatched import DeepEpNormalDispatchOutput
from moe.fold import fold_topk_weights
from moe.indices import arrival_numbers, exclusive_psum, m_indices_from_counts
from moe.permute.context import PermuteContext
from moe.rows import spread_rows, spread_scales, take_rows
from moe.stages import CombineInput, ContigInput, Gemm2Output, PrePermuteOutput, Restore


def pre_permute(sent: DeepEpNormalDispatchOutput, context: PermuteContext) -> PrePermuteOutput:
    """Copy every received row to the segment of each of its local experts.

    Dispatch has announced how long segments are. It has quantised as well; where the wire is bf16
    and the recipe quantises, every received row is quantised here, once.
    Padding carries the expert's id and is computed on whatever lies there (poison here,
    uninitialised memory upstream; zero in deterministic inference, whatever the recipe).

    Source: SGLang 0.5.21, pre_permute_deepep_normal_to_deep_gemm, ep_scatter.
    """
    rows, output_index = ep_scatter(
        *_quantised(sent, context),
        sent.topk_ids,
        sent.num_recv_tokens_per_expert,
        context,
    )
    restore = Restore(
        topk_ids=sent.topk_ids, topk_weights=sent.topk_weights, output_index=output_index
    )
    return PrePermuteOutput(rows=rows, restore=restore)


def _quantised(
    sent: DeepEpNormalDispatchOutput, context: PermuteContext
) -> tuple[Tensor, Tensor | None]:
    """([R, H] rows as the experts read them, their scales or None)."""
    if context.quantize is None:
        return sent.hidden_states, sent.hidden_states_scale
    assert sent.hidden_states_scale is None, "these rows are quantised already"
    quantized = context.quantize(sent.hidden_states)
    return quantized.values, quantized.scale


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


def ep_scatter(
    hidden_states: Tensor,
    scale: Tensor | None,
    topk_ids: Tensor,
    counts: Tensor,
    context: PermuteContext,
) -> tuple[ContigInput, Tensor]:
    """Rows of tokens to the segments of their local experts, padding with the expert's own id.

    Args:
        hidden_states: [R, H] bf16, or e4m3 with scales.
        scale: its scales, or None.
        topk_ids: [R, K] int64 local experts; anything outside [0, L) is no route.
        counts: [L] int64 segment lengths.
        context: facts of the layer.

    Returns:
        The grouped rows, and the [R, K] int64 row of every route.

    Source: SGLang 0.5.21, ep_moe/kernels.py::ep_scatter.
    """
    output_index = scatter_index(topk_ids, counts, context.slot_order_seed)
    num_rows, zeroes = int(counts.sum()), context.zeroes_padding
    received, slot = (output_index >= 0).nonzero(as_tuple=True)
    places = output_index[received, slot]
    rows = ContigInput(
        hidden_states=spread_rows(
            take_rows(hidden_states, received), places, num_rows, zeroes_padding=zeroes
        ),
        hidden_states_scale=None
        if scale is None
        else spread_scales(take_rows(scale, received), places, num_rows, zeroes_padding=zeroes),
        m_indices=m_indices_from_counts(counts),
        live_rows=places.sort().values,
    )
    return rows, output_index


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

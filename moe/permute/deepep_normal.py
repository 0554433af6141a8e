"""deepep_normal to the contiguous layout and back: both halves of one conversion."""

from torch import Tensor

from moe.dispatched import DeepEpNormalDispatchOutput
from moe.indices import m_indices_from_counts
from moe.permute.context import PermuteContext
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
        partial=context.kernels.fold_topk_weights(
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
    kernels = context.kernels
    output_index = kernels.scatter_index(topk_ids, counts, context.slot_order_seed)
    num_rows, zeroes = int(counts.sum()), context.zeroes_padding
    received, slot = (output_index >= 0).nonzero(as_tuple=True)
    places = output_index[received, slot]
    rows = ContigInput(
        hidden_states=kernels.scatter_rows(
            hidden_states, received, places, num_rows, zeroes_padding=zeroes
        ),
        hidden_states_scale=None
        if scale is None
        else kernels.scatter_scales(scale, received, places, num_rows, zeroes_padding=zeroes),
        m_indices=m_indices_from_counts(counts),
        live_rows=places.sort().values,
    )
    return rows, output_index

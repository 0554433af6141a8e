"""The low-latency formats to the masked layout and back: both halves of one conversion."""

from moe.dispatched import LowLatencyDispatchOutput
from moe.indices import slab_rows
from moe.permute.context import PermuteContext
from moe.rows import take_rows
from moe.slabs import spread_slab_scales, spread_slabs
from moe.stages import CombineInput, Gemm2Output, MaskedInput, PrePermuteOutput, SlabRestore


def pre_permute(sent: LowLatencyDispatchOutput, context: PermuteContext) -> PrePermuteOutput:
    """The slabs as they came, or quantised here.

    That is where the recipe does and the wire did not; and again where the wire has other scales
    than the GEMMs read.

    Source: SGLang 0.5.21, pre_permute_deepep_ll_to_deep_gemm.
    """
    rows = MaskedInput(
        hidden_states=sent.hidden_states,
        hidden_states_scale=sent.hidden_states_scale,
        masked_m=sent.masked_m,
        expected_m=sent.expected_m,
    )
    if context.quantize is not None or context.requantize is not None:
        rows = _quantized(rows, context)
    return PrePermuteOutput(rows=rows, restore=SlabRestore(topk_weights=sent.topk_weights))


def post_permute(
    output: Gemm2Output, restore: SlabRestore, context: PermuteContext
) -> CombineInput:
    """The experts' slabs as they are; combine applies the weights, and the tail the factor.

    Source: SGLang 0.5.21, post_permute_deep_gemm_to_deepep_ll.
    """
    return CombineInput(partial=output.output, pending_weights=restore.topk_weights)


def _quantized(rows: MaskedInput, context: PermuteContext) -> MaskedInput:
    """Slabs with their real rows quantised, poison elsewhere."""
    num_slabs, height = rows.hidden_states.shape[:2]
    live = slab_rows(rows.masked_m, height)
    values, scale = take_rows(rows.hidden_states.flatten(0, 1), live), rows.hidden_states_scale
    if scale is None:
        assert context.quantize is not None, "only a recipe with scales quantises"
        quantized = context.quantize(values)
    else:
        assert context.requantize is not None, "these rows are quantised already"
        quantized = context.requantize(values, take_rows(scale.flatten(0, 1), live))
    return MaskedInput(
        hidden_states=spread_slabs(quantized.values, live, num_slabs, height),
        hidden_states_scale=spread_slab_scales(quantized.scale, live, num_slabs, height),
        masked_m=rows.masked_m,
        expected_m=rows.expected_m,
    )

"""Faults of a scale's arithmetic: how it is rounded, packed, inverted, and kept away from zero."""

from typing import Final

import torch
from torch import Tensor

from moe.dispatched import LowLatencyDispatchOutput
from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import Sent, rows_at, with_rows
from moe.faults.scale_edits import (
    Scaled,
    exponents_of,
    packed_rows,
    scaled_rows,
    with_scale,
    with_weight_scales,
)
from moe.formats import ScaleFormat, Stage
from moe.quant.fp8 import (
    GROUP_SIZE,
    QuantizedRows,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
    quantize_groups_fused,
    round_to_e4m3,
)
from moe.quant.ue8m0 import BYTES_PER_WORD, exponent_rounded_up, mn_major, pack_ue8m0
from moe.stages import ActivationOutput, PrePermuteOutput
from moe.weights import ExpertMatrix, LayerWeights

_UNDER_RECIPROCAL: Final = 254
"""An exponent byte and that of its reciprocal add up to it."""


def scales_rounded_up_late(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """Codes by a group's largest magnitude itself; its scale is rounded up to a power of two after.

    Values of a group come out as much larger as its scale was rounded up, at most twice.

    By reading of SGLang 0.5.21, moe_runner/deep_gemm.py::_run_contiguous_gemm (situ).
    """
    rows = packed_rows(middle, context)
    if rows is None:
        return middle
    exact = _exact_scales(middle.activation, rows.places, rows.stored.shape[1])
    return with_scale(middle, rows.scale, with_rows(rows.values, rows.places, exact.values))


def low_latency_scales_rounded_up(
    permuted: PrePermuteOutput, context: FaultContext
) -> PrePermuteOutput:
    """fp32 scales of the wire rounded up to powers of two, under codes that stay as they came.

    By reading of SGLang 0.5.21, moe_runner/deep_gemm.py::_run_masked_gemm,
    _cast_to_e8m0_with_rounding_up.
    """
    rows, sent = packed_rows(permuted, context), context.seen[Stage.DISPATCH]
    if rows is None or not isinstance(sent, LowLatencyDispatchOutput):
        return permuted
    wire_scale = sent.hidden_states_scale
    if wire_scale is None or wire_scale.dtype != torch.float32:
        return permuted
    codes = with_rows(rows.values, rows.places, rows_at(sent.hidden_states, rows.places))
    scale = rows.with_stored(exponent_rounded_up(rows_at(wire_scale, rows.places)))
    return with_scale(permuted, scale, codes)


def pack_mantissa_leak(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """Four fp32 scales put into a word by shifts alone: mantissas run into the lower bytes.

    The last byte of a word, and the only one that no other scale runs into, is rounded down.
    """
    rows = packed_rows(middle, context)
    if rows is None:
        return middle
    exact = _exact_scales(middle.activation, rows.places, rows.stored.shape[1])
    words = _packed_without_masks(exact.scale)
    return with_scale(middle, with_rows(rows.scale, rows.places, words))


def pack_mantissa_leak_2d(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """The same with the scales of weights that come in blocks: those that their codes call for."""

    def leaked(matrix: ExpertMatrix) -> Tensor | None:
        if not _has_packed_blocks(matrix):
            return None
        assert matrix.scale is not None
        values = dequantize_groups(matrix.values, matrix.scale)
        exact = quantize_blocks(values, ScaleFormat.FP32).scale_inv
        by_row = exact.repeat_interleave(GROUP_SIZE, dim=-2)[..., : values.shape[-2], :]
        return _packed_without_masks(by_row)

    return with_weight_scales(weights, leaked)


def pow2_log2_inexact(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """Scales of weights that come in blocks land one exponent higher than they are.

    They are powers of two by the time they are packed; a logarithm that is not exact takes each
    for a little more than it is.
    """

    def raised(matrix: ExpertMatrix) -> Tensor | None:
        exponents = exponents_of(matrix) if _has_packed_blocks(matrix) else None
        return None if exponents is None else pack_ue8m0(exponents + 1)

    return with_weight_scales(weights, raised)


def amax_floor_dropped(sent: Sent, context: FaultContext) -> Sent:
    """Received rows of zeros have the scale 0, and what 0 / 0 makes of their codes.

    A rank without tokens sends such a row in the prefill of deepep_v2.
    """
    rows = scaled_rows(sent, context)
    if rows is None:
        return sent
    codes = rows_at(rows.values, rows.places)
    is_zero = (codes.view(torch.uint8) == 0).all(1)
    places = rows.places[is_zero]
    if places.numel() == 0:
        return sent
    no_numbers = torch.full((len(places), codes.shape[1]), torch.nan)
    no_scale = torch.zeros_like(rows_at(rows.scale, places))
    return with_scale(
        sent,
        with_rows(rows.scale, places, no_scale),
        with_rows(rows.values, places, round_to_e4m3(no_numbers)),
    )


def scale_inverted(value: Scaled, context: FaultContext) -> Scaled:
    """Scales hold what the quantiser multiplied by, where the GEMM multiplies by the reciprocal."""
    rows = scaled_rows(value, context)
    if rows is None:
        return value
    stored = rows.stored
    inverse = _UNDER_RECIPROCAL - stored if rows.is_packed else stored.reciprocal()
    return with_scale(value, rows.with_stored(inverse))


def _exact_scales(activation: Tensor, places: Tensor, num_groups: int) -> QuantizedRows:
    """Codes and fp32 scales of the rows in ``places``, as the kernel of their dtype makes them."""
    source = rows_at(activation, places)
    quantize = quantize_groups_fused if source.dtype == torch.float32 else quantize_groups
    return quantize(source, ScaleFormat.FP32, group_size=source.shape[1] // num_groups)


def _has_packed_blocks(matrix: ExpertMatrix) -> bool:
    """Whether its scales have been computed and packed; those of mx checkpoints come as bytes."""
    scale = matrix.scale
    return scale is not None and scale.dtype == torch.int32 and matrix.group_size == GROUP_SIZE


def _packed_without_masks(scale: Tensor) -> Tensor:
    """[..., MN, ceil(G/4)] int32, MN-major, of [..., MN, G] fp32: shifted and joined by OR.

    Byte ``i`` of a word should be the exponent of its scale ``i``.
    """
    bits = torch.nn.functional.pad(scale, (0, -scale.shape[-1] % BYTES_PER_WORD)).view(torch.int32)
    first, second, third, fourth = (bits[..., byte::BYTES_PER_WORD] for byte in range(4))
    return mn_major(first >> 23 | second >> 15 | third >> 7 | fourth << 1)


SCALE_FAULTS: Final = (
    value_fault(
        Stage.ACTIVATION,
        scales_rounded_up_late,
        "codes by the exact largest magnitude, its power-of-two scale rounded up afterwards",
        "sglang-0.5.21",
        rank="all",
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        low_latency_scales_rounded_up,
        "fp32 scales of a low-latency wire rounded up to powers of two, codes kept",
        "sglang-0.5.21",
        rank="all",
    ),
    value_fault(
        Stage.ACTIVATION,
        pack_mantissa_leak,
        "fp32 scales of activations packed by shifts alone, mantissas and all",
        "deepseek-ai/DeepGEMM#337",
    ),
    value_fault(
        Stage.WEIGHTS,
        pack_mantissa_leak_2d,
        "fp32 scales of weights in blocks packed by shifts alone, mantissas and all",
        "NVIDIA/TransformerEngine#2589",
    ),
    value_fault(
        Stage.WEIGHTS,
        pow2_log2_inexact,
        "scales of weights that are powers of two already rounded up to the next one",
        "sgl-project/sglang#29956",
    ),
    value_fault(
        Stage.DISPATCH,
        amax_floor_dropped,
        "rows of zeros quantised without a least magnitude: scale 0, codes of 0 / 0",
        "our own reading of the quantisers' floors",
    ),
    value_fault(
        Stage.ACTIVATION,
        scale_inverted,
        "scales of activations stored as their reciprocals",
        "our own reading of the two conventions",
        stage="activation",
    ),
)

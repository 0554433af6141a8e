"""Weights in groups of 32 columns with power-of-two scales, in float64 and from the definition."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from moe.golden.number_formats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    round_e2m1,
    round_e4m3,
    round_ue8m0_up,
)
from moe.golden.quantize import Quantized, QuantizedBlocks

_GROUP: Final = 32
_BLOCK: Final = 128
# 384 = 6 * 2^6 is the largest e4m3 code that 6 times a power of two reaches.
_LARGEST_RATIO: Final = 64.0


def quantize_mxfp8_weight(w: Tensor) -> Quantized:
    """Quantise each run of 32 columns to e4m3 with a UE8M0 scale rounded up.

    Args:
        w: [N, K] float64, finite, values that float32 holds.

    Raises:
        ValueError: K is no multiple of 32, or w is not finite.

    Source: triton_kernels, downcast_to_mxfp with DequantScaleRoundingMode.ROUND_UP.
    """
    return _quantize(w, E4M3_MAX, round_e4m3)


def quantize_mxfp4_weight(w: Tensor) -> Quantized:
    """The same to e2m1: ``codes`` are values on the e2m1 grid.

    Args:
        w: [N, K] float64, finite, values that float32 holds.

    Raises:
        ValueError: K is no multiple of 32, or w is not finite.

    Source: triton_kernels, downcast_to_mxfp with DequantScaleRoundingMode.ROUND_UP.
    """
    return _quantize(w, E2M1_MAX, round_e2m1)


def _quantize(w: Tensor, largest: float, round_code: Callable[[Tensor], Tensor]) -> Quantized:
    num_rows, num_columns = w.shape
    if num_columns % _GROUP:
        raise ValueError(f"{num_columns} columns do not divide into groups of {_GROUP}")
    if not bool(w.isfinite().all()):
        raise ValueError("NaN and infinity have no place in a weight")
    grouped = w.reshape(num_rows, num_columns // _GROUP, _GROUP)
    scale = _scale_of_group(grouped.abs().amax(-1), largest)
    scaled = (grouped / scale.unsqueeze(-1)).reshape(w.shape)
    return Quantized(scaled=scaled, codes=round_code(scaled), scale=scale)


def _scale_of_group(amax: Tensor, largest: float) -> Tensor:
    """The power of two for a largest magnitude; its quotient is zero in float32 up to 2^-150."""
    quotient = amax / largest
    scale = round_ue8m0_up(quotient).clamp(min=2.0**-126)
    return scale.masked_fill(quotient <= 2.0**-150, 2.0**-127)


def decode_mxfp8(codes: Tensor, scale_bytes: Tensor) -> Tensor:
    """Weights of an mxfp8 checkpoint.

    Args:
        codes: [N, K] uint8 e4m3fn.
        scale_bytes: [N, K/32] uint8 UE8M0.

    Returns:
        [N, K] float64; NaN throughout a group whose byte is 255.
    """
    return decode_e4m3(codes) * _by_column(decode_ue8m0(scale_bytes))


def decode_mxfp4(packed: Tensor, scale_bytes: Tensor) -> Tensor:
    """Weights of an mxfp4 checkpoint.

    Args:
        packed: [N, K/2] uint8; column 2i in the low half of byte i, column 2i + 1 in the high one.
        scale_bytes: [N, K/32] uint8 UE8M0.

    Returns:
        [N, K] float64; NaN throughout a group whose byte is 255.
    """
    num_rows, num_bytes = packed.shape
    values = torch.empty(num_rows, 2 * num_bytes, dtype=torch.float64, device=packed.device)
    values[:, 0::2] = decode_e2m1(packed % 16)
    values[:, 1::2] = decode_e2m1(packed // 16)
    return values * _by_column(decode_ue8m0(scale_bytes))


def _by_column(scale: Tensor) -> Tensor:
    """[N, K/32] to [N, K]."""
    return scale.repeat_interleave(_GROUP, dim=1)


def fp4_as_fp8(packed: Tensor, scale_bytes: Tensor) -> QuantizedBlocks:
    """An mxfp4 weight divided by the scales of 128 x 128 blocks and rounded to e4m3.

    A block's scale is the largest scale of its groups over 64. Groups up to 2^14 under the
    largest keep their values; smaller ones are rounded.

    Args:
        packed: [N, K/2] uint8, as for ``decode_mxfp4``.
        scale_bytes: [N, K/32] uint8 UE8M0; a byte of 255 makes its whole block NaN.

    Source: SGLang 0.5.21, quantization/fp8.py::cast_e2m1fn_to_e4m3fn.
    """
    w = decode_mxfp4(packed, scale_bytes)
    scale = _in_blocks(decode_ue8m0(scale_bytes), _BLOCK // _GROUP).amax((1, 3)) / _LARGEST_RATIO
    ratio = _in_blocks(w, _BLOCK) / scale[:, None, :, None]
    scaled = ratio.flatten(2).flatten(0, 1)[: w.shape[0], : w.shape[1]]
    return QuantizedBlocks(scaled=scaled, codes=round_e4m3(scaled), scale=scale, block=_BLOCK)


def _in_blocks(x: Tensor, columns: int) -> Tensor:
    """[N, C] as [N/128, 128, C/columns, columns], zeros where the last blocks are cut."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % _BLOCK))
    return padded.view(padded.shape[0] // _BLOCK, _BLOCK, padded.shape[1] // columns, columns)

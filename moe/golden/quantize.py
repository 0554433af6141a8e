"""The recipes' quantisers in float64: groups of an activation row, blocks of a weight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.golden.number_formats import E4M3_MAX, power_of_two, round_bf16, round_e4m3


def _as_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.float64)


# The kernels hold these floors as float32 constants.
GROUP_AMAX_FLOOR: Final = float(_as_float32(torch.tensor(1e-10, dtype=torch.float64)))
LOW_LATENCY_AMAX_FLOOR: Final = float(_as_float32(torch.tensor(1e-4, dtype=torch.float64)))
_RECIPROCAL_OF_448: Final = float(_as_float32(torch.tensor(1 / E4M3_MAX, dtype=torch.float64)))
_BLOCK_AMAX_FLOOR: Final = float(_as_float32(torch.tensor(1e-4, dtype=torch.float64)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quantized:
    """Rows quantised in groups of consecutive columns.

    scaled  [R, C] float64  the value right in front of the rounding to a code, x / scale
    codes   [R, C] float64  values on the e4m3 grid
    scale   [R, G] float64  one a group
    """

    scaled: Tensor
    codes: Tensor
    scale: Tensor

    @property
    def dequantized(self) -> Tensor:
        """[R, C] float64, codes * scale."""
        num_rows, num_columns = self.codes.shape
        num_groups = self.scale.shape[1]
        grouped = self.codes.reshape(num_rows, num_groups, num_columns // num_groups)
        return (grouped * self.scale.unsqueeze(-1)).reshape(self.codes.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedBlocks:
    """A weight quantised in square blocks; blocks on the lower and right edge may be cut.

    scaled  [N, K] float64  the value right in front of the rounding to a code, w / scale
    codes   [N, K] float64  values on the e4m3 grid
    scale   [ceil(N/block), ceil(K/block)] float64
    block   rows and columns of a block
    """

    scaled: Tensor
    codes: Tensor
    scale: Tensor
    block: int

    @property
    def dequantized(self) -> Tensor:
        """[N, K] float64, codes * scale."""
        return self.codes * _spread(self.scale, self.codes.shape, self.block)


def quantize_groups(
    x: Tensor,
    scale_format: ScaleFormat,
    group_size: int = 128,
    amax_floor: float = GROUP_AMAX_FLOOR,
    *,
    in_fp32: bool = False,
) -> Quantized:
    """Quantise each row in groups to e4m3.

    The largest magnitude of a group is at least a floor; NaN elements do not count.

    FP32: the stored scale is amax times the float32 reciprocal of 448, rounded to float32, as in
    the kernel; the codes come from the ratio 448 / amax without a rounding. Kernels fused to an
    activation divide, so their stored scale may lie one float32 ulp beside this one.
    UE8M0: the scale is the smallest power of two that is at least amax / 448.

    A group that holds an infinity is poisoned: its scale is infinite (FP32) or NaN (UE8M0).

    Args:
        x: [R, C] float64.
        scale_format: FP32 or UE8M0.
        group_size: columns a scale covers.
        amax_floor: 1e-10, or 1e-4 of a low-latency wire, each as float32.
        in_fp32: the ratio 448 / amax is rounded to float32, and so is x times it, as in a kernel.

    Raises:
        ValueError: C is no multiple of group_size, or scale_format is NONE.

    Source: SGLang 0.5.21, kernels/jit/csrc/gemm/per_token_group_quant.cuh.
    """
    num_rows, num_columns = x.shape
    if num_columns % group_size:
        raise ValueError(f"{num_columns} columns do not divide into groups of {group_size}")
    grouped = x.reshape(num_rows, num_columns // group_size, group_size)
    amax = _amax(grouped, (-1,)).clamp(min=amax_floor)
    scaled, scale = _scaled(grouped, amax, scale_format, lambda one: one.unsqueeze(-1))
    scaled = scaled.reshape(x.shape)
    if in_fp32 and scale_format is ScaleFormat.FP32:
        scaled = _as_float32(grouped * _as_float32(E4M3_MAX / amax).unsqueeze(-1)).reshape(x.shape)
    if scale_format is ScaleFormat.FP32:
        scale = _as_float32(amax * _RECIPROCAL_OF_448)
    return Quantized(scaled=scaled, codes=round_e4m3(scaled), scale=scale)


def gathered_in_fp8(x: Tensor) -> Tensor:
    """[T, H] float64 that a gather in fp8 leaves of tokens: groups of 128, stored as bf16 again.

    Source: SGLang 0.5.21, layers/dp_attention.py (SGLANG_ENABLE_DP_GATHER_FP8).
    """
    return round_bf16(quantize_groups(x, ScaleFormat.FP32).dequantized)


def quantize_blocks(w: Tensor, scale_format: ScaleFormat, block: int = 128) -> QuantizedBlocks:
    """Quantise a weight in square blocks to e4m3; the scale rules are those of the groups.

    The largest magnitude of a block is at least 1e-4 (as float32).

    Args:
        w: [N, K] float64.
        scale_format: FP32 or UE8M0.
        block: rows and columns a scale covers; an edge block covers what is left.

    Raises:
        ValueError: scale_format is NONE.

    Source: DeepGEMM deep_gemm/utils/math.py::per_block_cast_to_fp8.
    """
    num_rows, num_columns = w.shape
    padding = (0, -num_columns % block, 0, -num_rows % block)
    padded = torch.nn.functional.pad(w, padding) if any(padding) else w
    blocks = padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block)
    amax = _amax(blocks, (1, 3)).clamp(min=_BLOCK_AMAX_FLOOR)
    scaled, scale = _scaled(blocks, amax, scale_format, lambda one: one[:, None, :, None])
    scaled = scaled.view(padded.shape)[:num_rows, :num_columns].contiguous()
    return QuantizedBlocks(scaled=scaled, codes=round_e4m3(scaled), scale=scale, block=block)


def requantize_weight(codes: Tensor, scale_inv: Tensor, block: int = 128) -> QuantizedBlocks:
    """Turn a checkpoint's fp8 weight with scales of any value into one with UE8M0 scales.

    The weight is dequantised as the loader does it, a float32 product stored as bf16, and
    quantised a second time.

    Args:
        codes: [N, K] float64 on the e4m3 grid.
        scale_inv: [ceil(N/block), ceil(K/block)] float64, what a code is multiplied with.
        block: rows and columns a scale covers.

    Source: SGLang 0.5.21, srt/layers/quantization/fp8_utils.py::requant_weight_ue8m0.
    """
    product = _as_float32(codes * _spread(scale_inv, codes.shape, block))
    return quantize_blocks(round_bf16(product), ScaleFormat.UE8M0, block)


def merge_per_tensor(codes: Tensor, scales: Tensor) -> Tensor:
    """A weight whose equal parts of rows have a scale each, brought under the largest of them.

    With several parts every code is dequantised, stored as fp16, and rounded to e4m3 again; the
    kernel multiplies by the float32 reciprocal of the scale.

    Args:
        codes: [N, K] float64 on the e4m3 grid.
        scales: [P] float64, values of float32.

    Returns:
        [N, K] float64 codes times the largest scale.

    Source: SGLang 0.5.21, quantization/utils.py::per_tensor_dequantize; scaled_fp8_quant.
    """
    largest = scales.max()
    if len(scales) == 1:
        return codes * largest
    by_row = scales.repeat_interleave(codes.shape[0] // len(scales))[:, None]
    stored = _as_float32(codes * by_row).to(torch.float16).to(torch.float64)
    return round_e4m3(_as_float32(stored * _as_float32(1.0 / largest))) * largest


def _amax(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Largest magnitude over dims, NaN left out."""
    size = x.abs()
    largest = size.amax(dims)
    if bool(largest.isnan().any()):
        return size.nan_to_num_(nan=0.0, posinf=torch.inf).amax(dims)
    return largest


def _scaled(
    x: Tensor, amax: Tensor, scale_format: ScaleFormat, spread: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """``x`` in units of its scales, and the scales that are kept for these largest magnitudes.

    ``spread`` brings what there is one of for each scale to the elements of ``x``.
    """
    match scale_format:
        case ScaleFormat.FP32:
            # One rounding: the product is exact for bf16 x, so an exact tie stays a tie.
            return x * E4M3_MAX / spread(amax), _as_float32(amax / E4M3_MAX)
        case ScaleFormat.UE8M0:
            exponent = _ceil_exponent(amax)
            scale = power_of_two(exponent).masked_fill_(amax.isinf(), torch.nan)
            return x * spread(power_of_two(-exponent)), scale
        case ScaleFormat.NONE:
            raise ValueError("a quantiser needs a scale format: fp32 or ue8m0, not none")


def _ceil_exponent(amax: Tensor) -> Tensor:
    """Smallest e with amax <= 448 * 2^e, exactly, since 448 = 0.875 * 2^9; 128 for infinity."""
    mantissa, exponent = torch.frexp(amax)
    return (exponent - 9 + (mantissa > 0.875)).masked_fill(amax.isinf(), 128)


def _spread(per_block: Tensor, shape: torch.Size, block: int) -> Tensor:
    """One value a block, repeated to every element of a matrix of ``shape``."""
    rows = per_block.repeat_interleave(block, dim=0)[: shape[0]]
    return rows.repeat_interleave(block, dim=1)[:, : shape[1]]

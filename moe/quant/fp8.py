"""Activation and weight quantisers to e4m3fn, as the SGLang kernels round them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.indices import ceil_div
from moe.quant.ue8m0 import (
    exponent_rounded_up,
    pack_ue8m0,
    reciprocal_from_exponent,
    scale_from_exponent,
    unpack_ue8m0,
)

E4M3_MAX = 448.0
GROUP_SIZE = 128
ACTIVATION_AMAX_FLOOR = 1e-10
LOW_LATENCY_AMAX_FLOOR = 1e-4
"""Of DeepEP's low-latency wire; smaller groups lose their lower bits."""
WEIGHT_AMAX_FLOOR = 1e-4


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantizedRows:
    """Rows of e4m3 codes, one scale for every group of columns of a row.

    values  [R, C]   float8_e4m3fn
    scale   [R, G]   fp32 row-major, or [R, ceil(G / 4)] int32 packed UE8M0, MN-major
    """

    values: Tensor
    scale: Tensor


def round_to_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3fn code, ties to even, saturating; NaN becomes 448 as the kernels' min does."""
    clamped = values.nan_to_num(nan=E4M3_MAX).clamp_(-E4M3_MAX, E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn)


_VALUE_OF_CODE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def e4m3_to_fp32(codes: Tensor) -> Tensor:
    """e4m3fn codes as fp32, by table: torch's own cast is six times slower on a CPU."""
    index = codes.view(torch.uint8).to(torch.int32).flatten()
    return _VALUE_OF_CODE.to(codes.device).index_select(0, index).view(codes.shape)


def quantize_groups(
    rows: Tensor,
    scale_format: ScaleFormat,
    *,
    group_size: int = GROUP_SIZE,
    amax_floor: float = ACTIVATION_AMAX_FLOOR,
) -> QuantizedRows:
    """Quantise every run of ``group_size`` columns with a scale of its own.

    FP32 scales store ``amax * fl(1/448)`` and multiply by ``448 / amax``; UE8M0 rounds that scale
    up to a power of two first and multiplies by its reciprocal, which is exact.

    Args:
        rows: [R, C] bf16 (any float dtype works), C a multiple of the group size.
        scale_format: FP32 or UE8M0.
        group_size: columns that share a scale.
        amax_floor: least magnitude that a group is scaled for.

    Raises:
        ValueError: C is no multiple of the group size.

    Source: SGLang 0.5.21, jit/csrc/gemm/per_token_group_quant.cuh.
    """
    grouped = _as_groups(rows, group_size)
    amax = _amax(grouped).clamp_min(amax_floor)
    scale = amax * amax.new_tensor(1 / E4M3_MAX)
    if scale_format is ScaleFormat.UE8M0:
        exponent = exponent_rounded_up(scale)
        multiplier, stored = reciprocal_from_exponent(exponent), pack_ue8m0(exponent)
    else:
        # Number / tensor is number * reciprocal in torch, which rounds twice.
        multiplier, stored = amax.new_tensor(E4M3_MAX) / amax, scale
    codes = round_to_e4m3(grouped * multiplier[..., None])
    return QuantizedRows(values=codes.view(rows.shape), scale=stored)


def quantize_groups_fused(
    rows: Tensor,
    scale_format: ScaleFormat,
    *,
    group_size: int = GROUP_SIZE,
    by_division: bool = False,
) -> QuantizedRows:
    """``quantize_groups`` as the kernels do it that are fused with an activation.

    FP32 scales are ``amax / 448`` and values are multiplied by ``1 / scale``, or divided by it.
    UE8M0 rounds the same scale up to a power of two.

    Args:
        rows: [R, C] fp32 as the activation computed them, C a multiple of the group size.
        scale_format: FP32 or UE8M0.
        group_size: columns that share a scale.
        by_division: as the kernel of oai_swiglu does; without it as those of silu and situ.

    Raises:
        ValueError: C is no multiple of the group size.

    Source: SGLang 0.5.21, deepseek_v4/silu_and_mul_masked_post_quant.cuh; ep_moe/kernels.py.
    """
    grouped = _as_groups(rows, group_size)
    amax = _amax(grouped).clamp_min(ACTIVATION_AMAX_FLOOR)
    scale = amax / amax.new_tensor(E4M3_MAX)
    if scale_format is ScaleFormat.UE8M0:
        exponent = exponent_rounded_up(scale)
        scaled = grouped * reciprocal_from_exponent(exponent)[..., None]
        stored = pack_ue8m0(exponent)
    else:
        by_scale = scale[..., None]
        scaled = grouped / by_scale if by_division else grouped * by_scale.reciprocal()
        stored = scale
    return QuantizedRows(values=round_to_e4m3(scaled).view(rows.shape), scale=stored)


def requantize_groups(
    values: Tensor,
    scale: Tensor,
    *,
    scale_format: ScaleFormat,
    group_size: int = GROUP_SIZE,
    quantize: Callable[..., QuantizedRows] = quantize_groups,
) -> QuantizedRows:
    """Codes [R, C] with scales of one format, quantised again with scales of another.

    Rounding the scales up alone would make every value of a group larger by as much.
    ``quantize`` is ``quantize_groups``, whoever computes it.
    """
    rows = dequantize_groups(values, scale, group_size)
    return quantize(rows, scale_format, group_size=group_size)


def _as_groups(rows: Tensor, group_size: int) -> Tensor:
    """[R, C] as [R, G, group_size] fp32."""
    num_rows, width = rows.shape
    if width % group_size:
        raise ValueError(f"{width} columns do not split into groups of {group_size}")
    return rows.to(torch.float32).view(num_rows, width // group_size, group_size)


def _amax(grouped: Tensor) -> Tensor:
    """[R, G] largest magnitude of groups [R, G, C], NaN left out as the kernels' max does."""
    amax = grouped.abs().amax(-1)
    with_nan = amax.isnan()
    if bool(with_nan.any()):
        numbers = grouped[with_nan].nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        amax[with_nan] = numbers.abs().amax(-1)
    return amax


def group_scales(scale: Tensor, groups: int) -> Tensor:
    """Scales of ``QuantizedRows`` as [..., G] fp32, whichever way they are stored."""
    if scale.dtype == torch.int32:
        return scale_from_exponent(unpack_ue8m0(scale, groups))
    return scale


def dequantize_groups(values: Tensor, scale: Tensor, group_size: int = GROUP_SIZE) -> Tensor:
    """[..., C] fp32: e4m3 codes times the scale of their group (exact for UE8M0)."""
    return times_group_scales(e4m3_to_fp32(values), scale, group_size)


def times_group_scales(rows: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """``rows`` [..., C] fp32 in place, each group of columns times its scale; see above."""
    width = rows.shape[-1]
    by_group = group_scales(scale, ceil_div(width, group_size))
    if width % group_size:
        return rows.mul_(by_group.repeat_interleave(group_size, dim=-1)[..., :width])
    grouped = rows.view(*by_group.shape, group_size)
    return grouped.mul_(by_group[..., None]).view(rows.shape)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QuantizedBlocks:
    """A matrix of e4m3 codes, one fp32 scale for every 128 x 128 block.

    values     [..., N, K]                      float8_e4m3fn
    scale_inv  [..., ceil(N/128), ceil(K/128)]  fp32; multiply codes by it
    """

    values: Tensor
    scale_inv: Tensor


def quantize_blocks(matrix: Tensor, scale_format: ScaleFormat) -> QuantizedBlocks:
    """Quantise every 128 x 128 block with a scale of its own.

    Args:
        matrix: [..., N, K] float.
        scale_format: FP32 keeps ``amax / 448``; UE8M0 rounds it up to a power of two.

    Source: DeepGEMM, per_block_cast_to_fp8.
    """
    n, k = matrix.shape[-2:]
    blocks = _as_blocks(matrix.to(torch.float32))
    amax = blocks.abs().amax((-3, -1)).clamp_min(WEIGHT_AMAX_FLOOR)
    scale = amax / amax.new_tensor(E4M3_MAX)  # a GPU multiplies by the reciprocal of a number
    if scale_format is ScaleFormat.UE8M0:
        scale = scale_from_exponent(exponent_rounded_up(scale))
    codes = round_to_e4m3(blocks * (1 / scale)[..., :, None, :, None])
    flat = codes.flatten(-2).flatten(-3, -2)
    return QuantizedBlocks(values=flat[..., :n, :k].contiguous(), scale_inv=scale)


def dequantize_blocks(blocks: QuantizedBlocks) -> Tensor:
    """[..., N, K] fp32: codes times the scale of their block."""
    n, k = blocks.values.shape[-2:]
    scale = blocks.scale_inv.repeat_interleave(GROUP_SIZE, -2).repeat_interleave(GROUP_SIZE, -1)
    return e4m3_to_fp32(blocks.values) * scale[..., :n, :k]


def _as_blocks(matrix: Tensor) -> Tensor:
    """[..., N, K] as [..., N/128, 128, K/128, 128], zero-padded at the edges."""
    *batch, n, k = matrix.shape
    rows, cols = ceil_div(n, GROUP_SIZE), ceil_div(k, GROUP_SIZE)
    padded = torch.nn.functional.pad(matrix, (0, cols * GROUP_SIZE - k, 0, rows * GROUP_SIZE - n))
    return padded.view(*batch, rows, GROUP_SIZE, cols, GROUP_SIZE)

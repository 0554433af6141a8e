"""Weights in groups of 32 columns with a power-of-two scale each, and mxfp4 turned into fp8."""

import torch
from torch import Tensor

from moe.indices import ceil_div
from moe.quant.e2m1 import (
    CODES_PER_BYTE,
    E2M1_MAX,
    pack_e2m1,
    round_to_e2m1,
    unpacked_e2m1_to_fp32,
)
from moe.quant.fp8 import E4M3_MAX, GROUP_SIZE, QuantizedBlocks, e4m3_to_fp32, round_to_e4m3
from moe.quant.ue8m0 import exponent_rounded_up, reciprocal_from_exponent, scale_from_exponent

MX_GROUP_SIZE = 32
HEADROOM_BITS = 6
"""Binades that a block's scale lies under its largest group's: 6 * 2^6 still fits e4m3."""

_GROUPS_PER_BLOCK = GROUP_SIZE // MX_GROUP_SIZE
_BYTES_PER_GROUP = MX_GROUP_SIZE // CODES_PER_BYTE
_VANISHING_SHIFT = -13
"""Times 2^-13 every e2m1 value rounds to zero, since 6 * 2^-13 is under half of 2^-9."""


def quantize_mxfp8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise every run of 32 columns to e4m3 with a scale of its own.

    The scale is the smallest power of two that is not under ``amax / 448``, at least 2^-126; a
    group of zeros has the byte 0. So has a group whose ``amax / 448`` is zero in fp32.

    Args:
        matrix: [..., N, K] float, finite.

    Returns:
        [..., N, K] float8_e4m3fn and [..., N, K/32] uint8 UE8M0.

    Raises:
        ValueError: K is no multiple of 32, or the matrix is not finite.

    Source: triton_kernels, downcast_to_mxfp with DequantScaleRoundingMode.ROUND_UP.
    """
    scaled, exponent = _scaled_groups(matrix, E4M3_MAX)
    return round_to_e4m3(scaled), exponent


def quantize_mxfp4(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The same to e2m1: the scale is the smallest power of two not under ``amax / 6``.

    Args:
        matrix: [..., N, K] float, finite.

    Returns:
        [..., N, K/2] uint8, the earlier column in the low half, and [..., N, K/32] uint8 UE8M0.

    Raises:
        ValueError: K is no multiple of 32, or the matrix is not finite.

    Source: triton_kernels, downcast_to_mxfp with DequantScaleRoundingMode.ROUND_UP. Its kernel
    drops bits of fp32 values below 1 and takes the next three floats above 0.25 for the tie; on
    bf16 weights there is no difference.
    """
    scaled, exponent = _scaled_groups(matrix, E2M1_MAX)
    return pack_e2m1(round_to_e2m1(scaled)), exponent


def _scaled_groups(matrix: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """[..., N, K] fp32 in units of its scales and [..., N, K/32] their exponent bytes."""
    *batch, columns = matrix.shape
    if columns % MX_GROUP_SIZE:
        raise ValueError(f"{columns} columns do not split into groups of {MX_GROUP_SIZE}")
    grouped = matrix.to(torch.float32).reshape(*batch, columns // MX_GROUP_SIZE, MX_GROUP_SIZE)
    amax = grouped.abs().amax(-1)
    if not bool(amax.isfinite().all()):
        raise ValueError("a weight with NaN or infinity has no scale")
    # By a tensor: a division by a number multiplies by its reciprocal on some devices.
    exponent = exponent_rounded_up(amax / amax.new_tensor(largest))
    scaled = grouped * reciprocal_from_exponent(exponent)[..., None]
    return scaled.flatten(-2), exponent


def dequantize_mx(values: Tensor, scale: Tensor) -> Tensor:
    """Codes times the scale of their group, exact unless the product overflows fp32.

    Args:
        values: [..., N, K] float8_e4m3fn, or [..., N, K/2] uint8 packed e2m1.
        scale: [..., N, G] uint8 UE8M0 or fp32 factors, each for K/G columns.

    Returns:
        [..., N, K] fp32; a group with the byte 255 is NaN.
    """
    decode = unpacked_e2m1_to_fp32 if values.dtype == torch.uint8 else e4m3_to_fp32
    factors = scale_from_exponent(scale) if scale.dtype == torch.uint8 else scale
    decoded = decode(values)
    grouped = decoded.view(*scale.shape, decoded.shape[-1] // scale.shape[-1])
    return grouped.mul_(factors[..., None]).view(decoded.shape)


def cast_e2m1_to_e4m3(packed: Tensor, scale: Tensor) -> QuantizedBlocks:
    """Turn an mxfp4 matrix into e4m3 codes with one fp32 scale for every 128 x 128 block.

    The scale of a block is that of its largest group over 2^6, so the largest code is 384. A
    value v of a group d binades under the largest becomes the code ``v * 2^(6 - d)``, rounded.
    Nothing is lost where that is a multiple of 2^-9: with d <= 14 always; further down it depends
    on the values. 0.5 and 1.5 need d <= 14, 1 and 3 d <= 15, 2 and 6 d <= 16, 4 d <= 17; from
    d = 19 on all become zeros. Blocks at the edges cover what is left.

    Every block scale is exact in fp32, down to the subnormal 2^-133 of a block whose bytes are
    all zero. A byte of 255 makes the scale of its whole block NaN. A zero keeps its sign, which
    SGLang's table takes from the code of -0.

    Args:
        packed: [..., N, K/2] uint8, two e2m1 codes a byte, the earlier column in the low half.
        scale: [..., N, K/32] uint8 UE8M0.

    Raises:
        ValueError: the shapes are not those of groups of 32 columns.

    Source: SGLang 0.5.21, quantization/fp8.py::cast_e2m1fn_to_e4m3fn.
    """
    if packed.shape != (*scale.shape[:-1], scale.shape[-1] * _BYTES_PER_GROUP):
        raise ValueError(
            f"packed codes {tuple(packed.shape)} need one scale for every {_BYTES_PER_GROUP} "
            f"bytes of a row, got {tuple(scale.shape)}"
        )
    largest = _largest_of_blocks(scale)
    by_row = largest.to(torch.int32).repeat_interleave(GROUP_SIZE, dim=-2)
    by_group = by_row.repeat_interleave(_GROUPS_PER_BLOCK, dim=-1)
    shift = scale - by_group[..., : scale.shape[-2], : scale.shape[-1]] + HEADROOM_BITS
    return QuantizedBlocks(
        values=_shifted_codes(packed, shift),
        scale_inv=scale_from_exponent(largest) * 2.0**-HEADROOM_BITS,
    )


def _largest_of_blocks(scale: Tensor) -> Tensor:
    """[..., N, K/32] uint8 to the largest byte of every block, [..., ceil(N/128), ceil(K/128)]."""
    *batch, rows, groups = scale.shape
    blocks = ceil_div(rows, GROUP_SIZE), ceil_div(groups, _GROUPS_PER_BLOCK)
    padded = scale.new_zeros((*batch, blocks[0] * GROUP_SIZE, blocks[1] * _GROUPS_PER_BLOCK))
    padded[..., :rows, :groups] = scale
    return padded.view(*batch, blocks[0], GROUP_SIZE, blocks[1], _GROUPS_PER_BLOCK).amax((-3, -1))


def _codes_by_shift() -> Tensor:
    """[20 * 256] int16: two e4m3 codes for each shift from -13 to 6 and each packed byte."""
    exponents = torch.arange(_VANISHING_SHIFT, HEADROOM_BITS + 1) + 127
    values = unpacked_e2m1_to_fp32(torch.arange(256, dtype=torch.uint8))
    codes = round_to_e4m3(scale_from_exponent(exponents.to(torch.uint8))[:, None] * values)
    return codes.view(torch.int16).flatten()


_CODES_BY_SHIFT = _codes_by_shift()


def _shifted_codes(packed: Tensor, shift: Tensor) -> Tensor:
    """e4m3 codes of e2m1 values times a power of two, by table: four times the speed of products.

    Args:
        packed: [..., N, K/2] uint8
        shift: [..., N, K/32] int32, the power of each group.

    Returns:
        [..., N, K] float8_e4m3fn
    """
    table_row = (shift - _VANISHING_SHIFT).clamp_min(0) * 256
    byte = packed.to(torch.int32).reshape(*shift.shape, _BYTES_PER_GROUP)
    index = (byte + table_row[..., None]).flatten()
    codes = _CODES_BY_SHIFT.to(packed.device).index_select(0, index)
    return codes.view(packed.shape).view(torch.float8_e4m3fn)

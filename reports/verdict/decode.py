"""What quantised tensors stand for, in float64, read with the golden's own formats."""

from typing import Final

import torch
from torch import Tensor

from moe.golden import decode_e2m1, decode_e4m3, unpack_ue8m0

BLOCK: Final = 128
"""Columns, and of weights rows as well, that share a scale unless groups are smaller."""

BYTES_OF_WORD: Final = 4
"""Exponents that are packed into one int32."""

NO_NUMBER: Final = 255
"""The exponent byte of a scale that is none."""


def num_words(groups: int) -> int:
    """Words that hold the exponents of so many groups."""
    return -(-groups // BYTES_OF_WORD)


def scales_f64(scale: Tensor, num_groups: int) -> Tensor:
    """[R, G] float64 scales of fp32 or packed UE8M0 storage."""
    if scale.dtype == torch.int32:
        return unpack_ue8m0(scale.clone(memory_format=torch.contiguous_format), num_groups)
    return scale.to(torch.float64)


def codes_f64(values: Tensor) -> Tensor:
    """float64 values of e4m3 codes."""
    return decode_e4m3(values.view(torch.uint8))


def fp4_f64(packed: Tensor) -> Tensor:
    """[N, K] float64 values of [N, K/2] bytes, the earlier column in the low half."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    return decode_e2m1(codes.flatten(-2))


def dequantized(values: Tensor, scale: Tensor | None, group_size: int) -> Tensor:
    """[R, C] float64 that a GEMM reads: bf16 as it is, codes times the scale of their group."""
    if scale is None or values.dtype != torch.float8_e4m3fn:
        return values.to(torch.float64)
    num_rows, width = values.shape
    num_groups = -(-width // group_size)
    grouped = codes_f64(values).view(num_rows, num_groups, width // num_groups)
    return (grouped * scales_f64(scale, num_groups)[..., None]).view(num_rows, width)


def decode_matrix(values: Tensor, scale: Tensor | None, group_size: int) -> Tensor:
    """[N, K] float64 of one prepared matrix: what a GEMM multiplies with.

    Args:
        values: [N, K] bf16 or e4m3, or [N, K/2] uint8 of two e2m1 codes.
        scale: None, [N/128, K/128] fp32, or [N, ceil(K/group/4)] int32 packed UE8M0.
        group_size: columns of a row that share a packed scale.
    """
    if scale is None:
        return values.to(torch.float64)
    codes = fp4_f64(values) if values.dtype == torch.uint8 else codes_f64(values)
    if scale.dtype != torch.int32:
        return codes * spread_blocks(scale.to(torch.float64), codes.shape)
    groups = -(-codes.shape[1] // group_size)
    by_row = unpack_ue8m0(scale.clone(memory_format=torch.contiguous_format), groups)
    return codes * by_row.repeat_interleave(group_size, dim=1)[:, : codes.shape[1]]


def spread_blocks(scale: Tensor, shape: torch.Size) -> Tensor:
    """[N, K]: the scale of each 128 x 128 block at every cell of it."""
    rows = scale.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]

"""Groups of columns to e4m3 codes with a scale of their own: stored bf16 or fp32 rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.formats import ScaleFormat
from moe.indices import align, ceil_div
from moe.quant.fp8 import ACTIVATION_AMAX_FLOOR, GROUP_SIZE, QuantizedRows
from moe.quant.ue8m0 import BYTES_PER_WORD, TMA_ALIGNED_WORDS
from moe.triton_kernels.launch import ROUNDS_EVERY_STEP, bits_of
from moe.triton_kernels.number_formats import (
    bf16_to_fp32,
    fp32_to_e4m3,
    ue8m0_reciprocal,
    ue8m0_rounded_up,
)

ROWS_PER_PROGRAM = 16


@triton.jit
def group_codes(values, floor, UE8M0: tl.constexpr, FUSED: tl.constexpr):
    """Codes of groups, and what is stored as their scale.

    Args:
        values: [R, C] fp32, a group a row.
        floor: least magnitude that a group is scaled for.
        UE8M0: power-of-two scales, else fp32.
        FUSED: divide as the kernels that are fused with an activation do.

    Returns:
        [R, C] uint8, and [R] fp32 scales or int32 exponent bytes.
    """
    magnitude = tl.where(values == values, tl.abs(values), 0.0)
    amax = tl.max(magnitude, axis=1)
    amax = tl.where(amax > floor, amax, floor)
    if FUSED:
        scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    else:
        scale = amax * (1.0 / 448.0)
    if UE8M0:
        stored = ue8m0_rounded_up(scale)
        multiplier = ue8m0_reciprocal(stored)
    else:
        stored = scale
        if FUSED:
            multiplier = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)
        else:
            multiplier = tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax)
    return fp32_to_e4m3(values * multiplier[:, None]), stored


@triton.jit
def _quantize_groups_kernel(
    rows,
    codes,
    scales,
    num_rows,
    groups,
    scale_row_stride,
    scale_column_stride,
    floor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UE8M0: tl.constexpr,
    BF16: tl.constexpr,
):
    """One block of rows by one stored scale: an fp32 number, or the four bytes of a word."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    column = tl.arange(0, GROUP)
    stored_column = tl.program_id(1)
    PER_SCALE: tl.constexpr = 4 if UE8M0 else 1
    word = tl.zeros([ROWS], dtype=tl.int32)
    for part in tl.static_range(PER_SCALE):
        group = stored_column * PER_SCALE + part
        at = row.to(tl.int64)[:, None] * (groups * GROUP) + group * GROUP + column[None, :]
        mask = is_row[:, None] & (group < groups)
        values = tl.load(rows + at, mask=mask, other=0)
        if BF16:
            values = bf16_to_fp32(values)
        group_codes_, stored = group_codes(values, floor, UE8M0, False)
        tl.store(codes + at, group_codes_, mask=mask)
        if UE8M0:
            word |= tl.where(group < groups, stored << (8 * part), 0)
    place = row.to(tl.int64) * scale_row_stride + stored_column * scale_column_stride
    if UE8M0:
        tl.store(scales + place, word, mask=is_row)
    else:
        tl.store(scales + place, stored, mask=is_row)


def quantize_groups(
    rows: Tensor,
    scale_format: ScaleFormat,
    *,
    group_size: int = GROUP_SIZE,
    amax_floor: float = ACTIVATION_AMAX_FLOOR,
) -> QuantizedRows:
    """``moe.quant.fp8.quantize_groups`` in one kernel, bit by bit the same.

    Args:
        rows: [R, C] bf16 or fp32, C a multiple of the group size.
        scale_format: FP32 or UE8M0.
        group_size: columns that share a scale, a power of two.
        amax_floor: least magnitude that a group is scaled for.

    Raises:
        ValueError: C is no multiple of the group size.

    Source: SGLang 0.5.21, jit/csrc/gemm/per_token_group_quant.cuh.
    """
    num_rows, width = rows.shape
    if width % group_size:
        raise ValueError(f"{width} columns do not split into groups of {group_size}")
    groups, packs = width // group_size, scale_format is ScaleFormat.UE8M0
    values = rows.new_empty(rows.shape, dtype=torch.float8_e4m3fn)
    scale = empty_scales(rows, num_rows, groups, scale_format)
    if num_rows:
        grid = (ceil_div(num_rows, ROWS_PER_PROGRAM), scale.shape[1])
        _quantize_groups_kernel[grid](
            bits_of(rows.contiguous()),
            bits_of(values),
            scale,
            num_rows,
            groups,
            *scale.stride(),
            amax_floor,
            GROUP=group_size,
            ROWS=ROWS_PER_PROGRAM,
            UE8M0=packs,
            BF16=rows.dtype == torch.bfloat16,
            **ROUNDS_EVERY_STEP,
        )
    return QuantizedRows(values=values, scale=scale)


def empty_scales(like: Tensor, num_rows: int, groups: int, scale_format: ScaleFormat) -> Tensor:
    """Room for the scales of ``QuantizedRows``: unwritten fp32, or zero words, MN-major."""
    if scale_format is not ScaleFormat.UE8M0:
        return like.new_empty((num_rows, groups), dtype=torch.float32)
    width = ceil_div(groups, BYTES_PER_WORD)
    storage = like.new_zeros((width, align(num_rows, TMA_ALIGNED_WORDS)), dtype=torch.int32)
    return storage.T[:num_rows]

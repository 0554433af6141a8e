"""Grouped rows back to tokens: ``ep_gather``, ``post_reorder``, and slabs to expanded rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.indices import ceil_div
from moe.poison import poison
from moe.triton_kernels.launch import ROUNDS_EVERY_STEP, bits_of, next_power_of_2
from moe.triton_kernels.number_formats import bf16_to_fp32, fp32_to_bf16

ROWS_PER_PROGRAM = 8
COLUMNS_PER_PROGRAM = 512


@triton.jit
def _fold_kernel(
    rows,
    output_index,
    topk_weights,
    is_route,
    out,
    num_tokens,
    columns,
    factor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A block of tokens: slots ascending, every product and every sum rounded to fp32."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token, is_column = token < num_tokens, column < columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        at = token * TOP_K + slot
        counts = tl.load(is_route + at, mask=is_token, other=0) != 0
        place = tl.load(output_index + at, mask=counts, other=0).to(tl.int64)
        weight = tl.load(topk_weights + at, mask=counts, other=0.0)
        read = place[:, None] * columns + column[None, :]
        bits = tl.load(rows + read, mask=counts[:, None] & is_column[None, :], other=0)
        total += bf16_to_fp32(bits) * weight[:, None]
    written = token.to(tl.int64)[:, None] * columns + column[None, :]
    mask = is_token[:, None] & is_column[None, :]
    tl.store(out + written, fp32_to_bf16(total * factor), mask=mask)


def fold_topk_weights(
    rows: Tensor,
    output_index: Tensor,
    topk_weights: Tensor,
    is_route: Tensor,
    factor: float = 1.0,
) -> Tensor:
    """``moe.fold.fold_topk_weights`` in one kernel, bit by bit the same but for NaN's own bits.

    Products and sums are not fused: each is rounded to fp32, slots ascending.

    Args:
        rows: [M, H] bf16.
        output_index: [R, K] int64 or int32.
        topk_weights: [R, K] fp32.
        is_route: [R, K] bool.
        factor: the routed scaling factor where it is folded in here.

    Returns:
        [R, H] bf16; zero for a token without a route.

    Source: SGLang 0.5.21, ep_gather, without a factor; post_reorder_deepgemm, with it.
    """
    num_tokens, top_k = output_index.shape
    out = rows.new_empty((num_tokens, rows.shape[1]))
    if not rows.shape[0]:
        return out.zero_()
    if out.numel():
        width = min(COLUMNS_PER_PROGRAM, next_power_of_2(rows.shape[1]))
        grid = (ceil_div(num_tokens, ROWS_PER_PROGRAM), ceil_div(rows.shape[1], width))
        _fold_kernel[grid](
            bits_of(rows.contiguous()),
            (output_index % rows.shape[0]).contiguous(),  # as upstream, -1 is not looked for
            topk_weights.contiguous(),
            is_route.contiguous().view(torch.uint8),
            bits_of(out),
            num_tokens,
            rows.shape[1],
            factor,
            TOP_K=top_k,
            ROWS=ROWS_PER_PROGRAM,
            COLUMNS=width,
            **ROUNDS_EVERY_STEP,
        )
    return out


@triton.jit
def _weighted_rows_kernel(
    rows,
    source,
    weights,
    out,
    places,
    num_rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out[places[i]] = rows[source[i]] * weights[places[i]]``, one rounding to bf16."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = i < num_rows
    taken = tl.load(source + i, mask=is_row, other=0)
    place = tl.load(places + i, mask=is_row, other=0)
    weight = tl.load(weights + place, mask=is_row, other=0.0)
    mask = is_row[:, None] & (column < columns)[None, :]
    bits = tl.load(rows + taken[:, None] * columns + column[None, :], mask=mask, other=0)
    weighted = fp32_to_bf16(bf16_to_fp32(bits) * weight[:, None])
    tl.store(out + place[:, None] * columns + column[None, :], weighted, mask=mask)


def weigh_rows(rows: Tensor, source: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """``moe.row_kernels.weigh_rows`` in one kernel, bit by bit the same but for NaN's own bits.

    Source: SGLang 0.5.21, ep_moe/kernels.py::masked_slab_to_expand.
    """
    out = poison(rows.new_empty((weights.shape[0], rows.shape[1])))
    if source.shape[0]:
        width = min(COLUMNS_PER_PROGRAM, next_power_of_2(rows.shape[1]))
        grid = (ceil_div(source.shape[0], ROWS_PER_PROGRAM), ceil_div(rows.shape[1], width))
        _weighted_rows_kernel[grid](
            bits_of(rows.contiguous()),
            source.contiguous(),
            weights.contiguous(),
            bits_of(out),
            places.contiguous(),
            source.shape[0],
            rows.shape[1],
            ROWS=ROWS_PER_PROGRAM,
            COLUMNS=width,
            **ROUNDS_EVERY_STEP,
        )
    return out

"""Rows of tokens to grouped rows: ``ep_scatter``, and the masked preprocess, which has slabs.

A route's row is its segment's start and the routes to the same expert in front of it. Upstream
atomics decide that order; here it is drawn, so that a run repeats, and walked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.indices import ceil_div, drawn_order, exclusive_psum
from moe.poison import poison
from moe.quant.ue8m0 import mn_major
from moe.triton_kernels.launch import bits_of, next_power_of_2

ROUTES_PER_STEP = 256
ROWS_PER_PROGRAM = 16
COLUMNS_PER_PROGRAM = 512


@triton.jit
def _scatter_index_kernel(
    topk_ids, order, starts, output_index, num_routes, STEP: tl.constexpr, OUT: tl.constexpr
):
    """One expert: its routes, in the drawn order, one behind the other."""
    expert = tl.program_id(0)
    arrived = tl.load(starts + expert)
    for first in range(0, num_routes, STEP):
        step = first + tl.arange(0, STEP)
        route = tl.load(order + step, mask=step < num_routes, other=0)
        chosen = tl.load(topk_ids + route, mask=step < num_routes, other=-1)
        is_mine = chosen == expert
        place = arrived + tl.cumsum(is_mine.to(tl.int64), axis=0) - 1
        tl.store(output_index + route, place.to(OUT), mask=is_mine)
        arrived += tl.sum(is_mine.to(tl.int64), axis=0)


def scatter_index(topk_ids: Tensor, rows_per_expert: Tensor, seed: int) -> Tensor:
    """``moe.permute.scatter_index`` with one program an expert, bit by bit the same.

    Args:
        topk_ids: [R, K] int32 or int64 local experts; anything outside [0, L) is no route.
        rows_per_expert: [L] int64 segment lengths, or L times the height of slabs.
        seed: of the order inside a segment.

    Returns:
        [R, K] of the dtype of ``topk_ids``, -1 where there is no route.

    Source: SGLang 0.5.21, ep_moe/kernels.py::ep_scatter, moe_ep_deepgemm_preprocess.
    """
    num_experts = rows_per_expert.shape[0]
    output_index = torch.full_like(topk_ids, -1)
    routes = ((topk_ids >= 0) & (topk_ids < num_experts)).flatten().nonzero()[:, 0]
    order = routes[drawn_order(routes.shape[0], seed, routes.device)]
    if order.shape[0]:
        _scatter_index_kernel[(num_experts,)](
            topk_ids.contiguous(),
            order,
            exclusive_psum(rows_per_expert),
            output_index,
            order.shape[0],
            STEP=ROUTES_PER_STEP,
            OUT=tl.int64 if topk_ids.dtype == torch.int64 else tl.int32,
        )
    return output_index


@triton.jit
def _copy_rows_kernel(
    rows,
    source,
    out,
    places,
    num_rows,
    columns,
    row_stride,
    column_stride,
    height,
    out_slab_stride,
    out_row_stride,
    out_column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``out[places[i]] = rows[source[i]]``; a place counts the rows of all slabs."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = i < num_rows
    taken = tl.load(source + i, mask=is_row, other=0)
    place = tl.load(places + i, mask=is_row, other=0)
    mask = is_row[:, None] & (column < columns)[None, :]
    read = taken[:, None] * row_stride + column[None, :] * column_stride
    row = (place // height) * out_slab_stride + (place % height) * out_row_stride
    values = tl.load(rows + read, mask=mask, other=0)
    tl.store(out + row[:, None] + column[None, :] * out_column_stride, values, mask=mask)


def copy_rows(rows: Tensor, source: Tensor, out: Tensor, places: Tensor) -> Tensor:
    """``out`` with rows of ``rows`` [R, C] written in place.

    Args:
        rows: [R, C] of any dtype and strides.
        source: [N] int64, rows of it.
        out: [M, C] or [L, S, C] of the same dtype.
        places: [N] int64, ``slab * S + row``.
    """
    slabs = out if out.dim() == 3 else out[None]
    num_rows, columns = source.shape[0], rows.shape[1]
    if num_rows:
        width = min(COLUMNS_PER_PROGRAM, next_power_of_2(columns))
        grid = (ceil_div(num_rows, ROWS_PER_PROGRAM), ceil_div(columns, width))
        _copy_rows_kernel[grid](
            bits_of(rows),
            source.contiguous(),
            bits_of(slabs),
            places.contiguous(),
            num_rows,
            columns,
            *rows.stride(),
            slabs.shape[1],
            *slabs.stride(),
            ROWS=ROWS_PER_PROGRAM,
            COLUMNS=width,
        )
    return out


def scatter_rows(
    rows: Tensor, source: Tensor, places: Tensor, num_rows: int, *, zeroes_padding: bool = False
) -> Tensor:
    """``moe.row_kernels.scatter_rows`` in one kernel, bit by bit the same."""
    out = rows.new_empty((num_rows, rows.shape[1]))
    return copy_rows(rows, source, out.zero_() if zeroes_padding else poison(out), places)


def scatter_scales(
    scale: Tensor, source: Tensor, places: Tensor, num_rows: int, *, zeroes_padding: bool = False
) -> Tensor:
    """``moe.row_kernels.scatter_scales`` in one kernel, bit by bit the same."""
    if scale.dtype != torch.int32:
        return scatter_rows(scale, source, places, num_rows, zeroes_padding=zeroes_padding)
    out = mn_major(scale.new_zeros((num_rows, scale.shape[1])))
    return copy_rows(scale, source, out, places)


def scatter_slabs(
    rows: Tensor, source: Tensor, places: Tensor, num_slabs: int, height: int
) -> Tensor:
    """``moe.row_kernels.scatter_slabs`` in one kernel, bit by bit the same."""
    out = rows.new_empty((num_slabs, height, rows.shape[1]))
    return copy_rows(rows, source, poison(out), places)


def scatter_slab_scales(
    scale: Tensor, source: Tensor, places: Tensor, num_slabs: int, height: int
) -> Tensor:
    """``moe.row_kernels.scatter_slab_scales`` in one kernel, bit by bit the same."""
    if scale.dtype != torch.int32:
        return scatter_slabs(scale, source, places, num_slabs, height)
    out = poison(scale.new_empty((num_slabs, scale.shape[1], height))).transpose(1, 2)
    return copy_rows(scale, source, out, places)

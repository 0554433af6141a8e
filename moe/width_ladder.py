"""How many bits a GEMM backend's sums really keep: big, small, minus big, until small is lost.

Whatever a backend declares of its accumulator, certificates of exact sums rest on it; here it is
measured, with any backend that speaks ``GemmBackend``.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from moe.arithmetic import AccumulatorWidths
from moe.formats import ScaleFormat
from moe.gemm_backend import GemmBackend
from moe.quant.fp8 import GROUP_SIZE
from moe.quant.ue8m0 import pack_ue8m0, tma_aligned
from moe.weights import ExpertMatrix

BLOCKS: Final = 3
TALLEST: Final = 28
"""Rungs that are tried; small is 2^-12, big at most 2^16."""

ROWS: Final = 128
"""Of either operand: a tile of every kernel."""

_LEAST: Final = -6
"""Exponent of either factor of small, the least of a normal e4m3 number.

Tensor cores align a subnormal operand as if it were as large as that, so it costs a product bits:
on an H200 2^-8 in the place of the least normal number costs two.
"""

_MOST: Final = 8
"""Exponent of the largest power of two that e4m3 holds."""

_STEEP: Final = 15
"""From this rung on, big's second factor is the largest power of two; below it the least."""

Places = tuple[int, int, int]
"""Columns of big, small and minus big."""

_IN_BLOCK: Final[tuple[Places, ...]] = (
    (0, 1, 2),
    (0, 2, 1),
    (2, 0, 1),
    (0, 40, 80),
    (0, 80, 40),
    (5, 6, 120),
)
_ACROSS_BLOCKS: Final[tuple[Places, ...]] = (
    (0, 130, 260),
    (0, 260, 130),
    (130, 0, 260),
    (260, 130, 0),
)


def measured_widths(gemm: GemmBackend, scale_format: ScaleFormat) -> AccumulatorWidths:
    """Climb the ladder with segments, slabs and dense rows; one bit more than the rungs climbed.

    Sums are of ``BLOCKS * 128`` columns, scales of groups of 128; longer sums, fp4 weights and
    smaller groups are not tried.

    Args:
        gemm: the backend.
        scale_format: of both operands, which are e4m3; NONE: bf16.
    """
    in_block = [
        (big + start, small + start, minus_big + start)
        for start in range(0, BLOCKS * GROUP_SIZE, GROUP_SIZE)
        for big, small, minus_big in _IN_BLOCK
    ]
    return AccumulatorWidths(
        in_block=1 + min(_rungs(gemm, scale_format, places) for places in in_block),
        across_blocks=1 + min(_rungs(gemm, scale_format, places) for places in _ACROSS_BLOCKS),
    )


def _rungs(gemm: GemmBackend, scale_format: ScaleFormat, places: Places) -> int:
    """Rungs up to the first on which a form of the GEMM loses small."""
    rows, weights = _operands(places)
    rungs = torch.arange(1, TALLEST + 1)
    column = (rungs < _STEEP).to(torch.int64)
    least = TALLEST
    for product in _products(gemm, scale_format, rows, weights):
        kept = product[rungs - 1, column].to(torch.float64) == 2.0 ** (2 * _LEAST)
        least = min(least, int(kept.to(torch.int64).cumprod(0).sum()))
    return least


def _operands(places: Places) -> tuple[Tensor, Tensor]:
    """[ROWS, K] and [ROWS, K] fp32: rung r in row r - 1, seen by column 0 if steep, else by 1."""
    big, small, minus_big = places
    rows, weights = (torch.zeros(ROWS, BLOCKS * GROUP_SIZE) for _ in range(2))
    rung = torch.arange(1, TALLEST + 1)
    second = torch.where(rung < _STEEP, _LEAST, _MOST)
    factor = torch.exp2((rung + 2 * _LEAST - second).to(torch.float32))
    rows[:TALLEST, big], rows[:TALLEST, minus_big] = factor, -factor
    rows[:, small] = weights[:, small] = 2.0**_LEAST
    weights[:, [big, minus_big]] = 2.0**_MOST
    weights[1, [big, minus_big]] = 2.0**_LEAST
    return rows, weights


def _products(
    gemm: GemmBackend, scale_format: ScaleFormat, rows: Tensor, weights: Tensor
) -> Iterator[Tensor]:
    """[ROWS, ROWS] bf16 from each form: segments, slabs, dense."""
    dtype = torch.bfloat16 if scale_format is ScaleFormat.NONE else torch.float8_e4m3fn
    lhs, scale = rows.to(dtype), _ones(scale_format, ROWS)
    of_weights = _ones(scale_format, 1 if scale_format is ScaleFormat.FP32 else ROWS)
    rhs = gemm.load(
        ExpertMatrix(
            values=weights.to(dtype)[None], scale=None if of_weights is None else of_weights[None]
        )
    )
    yield gemm.grouped_gemm_nt_contig(lhs, scale, rhs, torch.zeros(ROWS, dtype=torch.int32))
    in_slab = None if scale is None else scale[None]
    full = torch.tensor([ROWS], dtype=torch.int32)
    yield gemm.grouped_gemm_nt_masked(lhs[None], in_slab, rhs, full)[0]
    yield gemm.gemm_nt(lhs, scale, rhs)


def _ones(scale_format: ScaleFormat, rows: int) -> Tensor | None:
    """Scales of 1: fp32 [rows, K/128], or packed exponents [rows, 1], as GEMMs read them."""
    match scale_format:
        case ScaleFormat.NONE:
            return None
        case ScaleFormat.FP32:
            return tma_aligned(torch.ones(rows, BLOCKS)) if rows > 1 else torch.ones(rows, BLOCKS)
        case ScaleFormat.UE8M0:
            ones = torch.full((rows, BLOCKS), 127, dtype=torch.uint8)
            return tma_aligned(pack_ue8m0(ones))

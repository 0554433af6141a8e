"""Which grouped rows the reference GEMM multiplies, and which it has the product of already.

Segments are mostly longer than what fills them: padding is NaN, which needs no product, or equal
rows, which need one.
"""

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from moe.indices import align

_WORDS: Final[Mapping[int, torch.dtype]] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)
"""By bytes, to compare bits by."""


class Segment(NamedTuple):
    """Rows ``start`` to ``end`` meet ``expert``; up to ``last`` all equal the one before."""

    expert: int
    start: int
    end: int
    last: int


def segments_of(lhs: Tensor, scale: Tensor | None, m_indices: Tensor, tile: int) -> list[Segment]:
    """What to multiply of segments that lie end to end: whole tiles; of equal rows at an end, one.

    A row of NaN behind them is NaN whatever it meets.

    Args:
        lhs: [M, K] rows.
        scale: [M, G] of these, or None.
        m_indices: [M] expert of each, -1 = none.
        tile: rows of a whole tile.
    """
    experts, lengths = torch.unique_consecutive(m_indices, return_counts=True)
    is_number, repeats = (~lhs[:, 0].isnan()).tolist(), _repeats(lhs, scale).tolist()
    segments, start = [], 0
    for expert, length in zip(experts.tolist(), lengths.tolist(), strict=True):
        live = length
        while live and not is_number[start + live - 1]:
            live -= 1
        different = live
        while different > 1 and repeats[start + different - 1]:
            different -= 1
        if expert >= 0 and different < live:
            segments.append(Segment(expert, start, start + different, start + live))
        elif expert >= 0 and live:
            segments.append(_whole_tiles(expert, start, live, length, tile))
        start += length
    return segments


def slab_tiles(masked_m: Tensor, height: int, tile: int) -> list[Segment]:
    """What to multiply of slabs that lie end to end, in whole tiles.

    Args:
        masked_m: [L] rows of each slab that count.
        height: rows of a slab.
        tile: rows of a whole tile.
    """
    return [
        _whole_tiles(expert, expert * height, live, height, tile)
        for expert, live in enumerate(masked_m.tolist())
        if live
    ]


def places_of(segments: list[Segment], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to multiply, rows to fill, and for each of these its place among the first."""
    span = partial(torch.arange, device=device)
    computed, filled, source = ([span(0)] for _ in range(3))
    start = 0
    for segment in segments:
        count = segment.end - segment.start
        computed.append(span(segment.start, segment.end))
        filled.append(span(segment.start, segment.last))
        source.append(start + span(len(filled[-1])).clamp_(max=count - 1))
        start += count
    return torch.cat(computed), torch.cat(filled), torch.cat(source)


def _whole_tiles(expert: int, start: int, live: int, length: int, tile: int) -> Segment:
    end = start + min(align(live, tile), length)
    return Segment(expert, start, end, end)


def _repeats(lhs: Tensor, scale: Tensor | None) -> Tensor:
    """[M] bool: rows that have every bit of the row before, their scales included."""
    repeats = torch.zeros(len(lhs), dtype=torch.bool, device=lhs.device)
    if len(lhs) and (scale is None or len(scale) == len(lhs)):
        repeats[1:] = _like_the_one_before(lhs)
        if scale is not None:
            repeats[1:] &= _like_the_one_before(scale)
    return repeats


def _like_the_one_before(rows: Tensor) -> Tensor:
    """[M - 1] bool, of the second row and those behind it."""
    size = rows.element_size()
    if rows.stride(1) == 1:  # a row is one piece, which may divide into larger words
        cells = math.gcd(rows.shape[1], rows.stride(0), rows.storage_offset())
        size = math.gcd(cells * size, max(_WORDS))
    bits = rows.view(_WORDS[size])
    return (bits[1:] == bits[:-1]).all(1)

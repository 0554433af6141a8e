"""Faults of tiles and launches: rows that nobody writes, and rows written by the wrong tile."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from moe.dispatched import DeepEpV2ExpandedDispatchOutput
from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import live_places, rows_at, with_rows
from moe.formats import Stage
from moe.poison import poison
from moe.stages import (
    ActivationOutput,
    ContigInput,
    Gemm1Output,
    Gemm2Output,
    MaskedInput,
    PrePermuteOutput,
    RunnerInput,
)

Multiplied = TypeVar("Multiplied", Gemm1Output, Gemm2Output)
Value = TypeVar("Value", ActivationOutput, Gemm1Output, Gemm2Output)

_OF_GEMMS: Final = (Gemm1Output, Gemm2Output)
_BLOCK: Final = 128
"""Columns of a tile."""


def padding_scales_unwritten(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """Packed scales of segments' padding hold garbage, where zeros are due.

    Of rows that pre-permute scatters: those of an expanded dispatch hold anything in any case.
    """
    rows = permuted.rows
    scale = rows.hidden_states_scale
    is_expanded = isinstance(context.seen[Stage.DISPATCH], DeepEpV2ExpandedDispatchOutput)
    if not isinstance(rows, ContigInput) or scale is None or is_expanded:
        return permuted
    if scale.dtype != torch.int32:
        return permuted
    is_padding = torch.ones(len(scale), dtype=torch.bool)
    is_padding[rows.live_rows] = False
    garbage = _unwritten(scale, is_padding.nonzero()[:, 0])
    return replace(permuted, rows=replace(rows, hidden_states_scale=garbage))


def masked_rows_past_launch(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """The masked kernel with a clamp starts a block for each of ``height * K`` rows, and no more.

    Real rows are numbered slab after slab; those past the launch stay unwritten. Slabs that are as
    high as there are tokens have room enough, capped ones need not.

    By reading of SGLang 0.5.21, silu_and_mul_masked_post_quant.
    """
    rows: RunnerInput = context.seen[Stage.PRE_PERMUTE].rows
    is_fused = middle.activation.dtype == torch.float32  # no other kernel keeps it unrounded
    if not isinstance(rows, MaskedInput) or not is_fused:
        return middle
    top_k = context.seen[Stage.ROUTE].topk_ids.shape[1]
    past = live_places(rows)[rows.hidden_states.shape[1] * top_k :]
    return _each_tensor(middle, lambda tensor: _unwritten(tensor, past))


def gemm_tail_rows_dropped(output: Multiplied, context: FaultContext) -> Multiplied:
    """Rows of an expert past its last whole tile are not written."""
    if not isinstance(output, _OF_GEMMS):
        return output
    segments = _segments(context.seen[Stage.PRE_PERMUTE].rows)
    whole = segments.count // _tile(context) * _tile(context)
    is_tail = segments.number >= whole[segments.of_row]
    return _each_tensor(output, lambda tensor: _unwritten(tensor, segments.live[is_tail]))


def tile_spilled(output: Multiplied, context: FaultContext) -> Multiplied:
    """A segment's last tile is stored whole, over the first rows of the segments behind."""
    if not isinstance(output, _OF_GEMMS):
        return output
    rows: RunnerInput = context.seen[Stage.PRE_PERMUTE].rows
    if not isinstance(rows, ContigInput):
        return output
    segments, tile = _segments(rows), _tile(context)
    end = segments.first + (segments.count + tile - 1) // tile * tile
    is_under = segments.live[:, None] < end
    is_under &= torch.arange(len(end)) < segments.of_row[:, None]  # a tile of a segment before
    spilled = segments.live[is_under.any(1)]
    return _each_tensor(output, lambda tensor: _unwritten(tensor, spilled))


def tile_of_next_block(output: Multiplied, context: FaultContext) -> Multiplied:
    """The first rows of the first columns hold what belongs in the block of columns behind."""
    if not isinstance(output, _OF_GEMMS):
        return output
    places = live_places(context.seen[Stage.PRE_PERMUTE].rows)[: _tile(context)]

    def moved(tensor: Tensor) -> Tensor:
        rows = rows_at(tensor, places)
        behind = rows[:, _BLOCK : 2 * _BLOCK]
        return with_rows(tensor, places, torch.cat([behind, rows[:, behind.shape[1] :]], dim=1))

    return _each_tensor(output, moved)


def odd_block_unwritten(multiplied: Gemm2Output, context: FaultContext) -> Gemm2Output:
    """Columns are written two blocks of 128 at a time; the last of an odd number is not."""
    places = live_places(context.seen[Stage.PRE_PERMUTE].rows)
    rows = rows_at(multiplied.output, places)
    start = rows.shape[1] // (2 * _BLOCK) * 2 * _BLOCK
    cut = torch.cat([rows[:, :start], poison(rows[:, start:])], dim=1)
    return replace(multiplied, output=with_rows(multiplied.output, places, cut))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Segments:
    """The N live rows by expert: E segments that are not empty.

    live          [N] int64  place of each
    of_row        [N] int64  its segment
    number        [N] int64  its number inside the segment
    first, count  [E] int64  first place of each segment, and its live rows
    """

    live: Tensor
    of_row: Tensor
    number: Tensor
    first: Tensor
    count: Tensor


def _segments(rows: RunnerInput) -> _Segments:
    live = live_places(rows)
    if isinstance(rows, ContigInput):
        expert = rows.m_indices[live]
    else:
        expert = live // rows.hidden_states.shape[1]
    _, of_row, count = torch.unique_consecutive(expert, return_inverse=True, return_counts=True)
    start = count.cumsum(0) - count
    return _Segments(
        live=live,
        of_row=of_row,
        number=torch.arange(len(live)) - start[of_row],
        first=live[start],
        count=count,
    )


def _tile(context: FaultContext) -> int:
    return int(context.params["tile"])


def _unwritten(rows: Tensor, places: Tensor) -> Tensor:
    return with_rows(rows, places, poison(rows_at(rows, places)))


def _each_tensor(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """The value with every tensor changed."""
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    changed: dict[str, Any] = {name: change(t) for name, t in held.items() if t is not None}
    return replace(value, **changed)


TILE_FAULTS: Final = (
    value_fault(
        Stage.PRE_PERMUTE,
        padding_scales_unwritten,
        "packed scales of segments' padding left unwritten",
        "vllm-project/vllm#49784",
    ),
    value_fault(
        Stage.ACTIVATION,
        masked_rows_past_launch,
        "rows past a launch sized by the capped slab left unwritten by the clamping kernel",
        "sglang-0.5.21",
        rank="all",
    ),
    value_fault(
        Stage.GEMM1,
        gemm_tail_rows_dropped,
        "rows of an expert past its last whole tile left unwritten",
        "deepseek-ai/DeepGEMM#193",
        stage="gemm1",
        tile=64,
    ),
    value_fault(
        Stage.GEMM1,
        tile_spilled,
        "a segment's last tile stored over the first rows of the next segment",
        "flashinfer-ai/flashinfer#3574",
        stage="gemm1",
        tile=256,
    ),
    value_fault(
        Stage.GEMM1,
        tile_of_next_block,
        "a tile of a GEMM's output holds the block of columns behind it",
        "flashinfer-ai/flashinfer#3227",
        stage="gemm1",
        tile=64,
    ),
    value_fault(
        Stage.GEMM2,
        odd_block_unwritten,
        "the last of an odd number of column blocks of GEMM2's output left unwritten",
        "deepseek-ai/DeepGEMM#193",
    ),
)

"""Rows of a stage value taken and replaced, whatever their dtype and memory layout.

A place counts rows; those of slabs lie end to end: ``slab * height + row``.
"""

from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from moe.dispatched import (
    DeepEpNormalDispatchOutput,
    DeepEpV2DispatchOutput,
    DeepEpV2ExpandedDispatchOutput,
    FlashInferDispatchOutput,
    FlashInferGatheredOutput,
    LowLatencyDispatchOutput,
    StandardDispatchOutput,
)
from moe.indices import slab_rows
from moe.stages import ContigInput, MaskedInput, RunnerInput

Sent = TypeVar(
    "Sent",
    StandardDispatchOutput,
    FlashInferDispatchOutput,
    FlashInferGatheredOutput,
    DeepEpNormalDispatchOutput,
    DeepEpV2DispatchOutput,
    DeepEpV2ExpandedDispatchOutput,
    LowLatencyDispatchOutput,
)
"""What some dispatcher hands over."""

FOLDS_THE_FACTOR: Final = (
    StandardDispatchOutput,
    FlashInferDispatchOutput,
    FlashInferGatheredOutput,
)
"""Of formats whose sum over a token's routes has the scaling factor in it."""


def received_places(sent: Sent) -> Tensor:
    """[N] int64 places of the received rows that hold a token or a route, ascending."""
    match sent:
        case LowLatencyDispatchOutput():
            return slab_rows(sent.masked_m, sent.hidden_states.shape[1])
        case DeepEpV2ExpandedDispatchOutput():
            return (sent.handle.message >= 0).nonzero()[:, 0]
        case FlashInferDispatchOutput():
            counts = sent.handle.counts
            return slab_rows(counts, len(sent.hidden_states) // len(counts))
        case _:
            return torch.arange(len(sent.hidden_states))


def live_places(rows: RunnerInput) -> Tensor:
    """[N] int64 places of the grouped rows that hold a route, ascending."""
    match rows:
        case ContigInput():
            return rows.live_rows
        case MaskedInput():
            return slab_rows(rows.masked_m, rows.hidden_states.shape[1])


def with_received(sent: Sent, places: Tensor, other: Sent, sources: Tensor) -> Sent:
    """The same with the rows of ``other`` at ``sources`` [N] in ``places`` [N], scales included."""
    rows: dict[str, Any] = {}
    for name in ("hidden_states", "hidden_states_scale"):
        into = getattr(sent, name, None)  # not every format has scales
        if into is not None:
            rows[name] = with_rows(into, places, rows_at(getattr(other, name), sources))
    return replace(sent, **rows)


def rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """[N, C] copies of the rows of [M, C] or [L, S, C] at ``places`` [N]."""
    return _as_words(rows)[_index(rows, places)].view(rows.dtype)


def with_rows(rows: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """A copy in the same memory layout with ``values`` [N, C] at ``places`` [N]."""
    copy = torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype).copy_(rows)
    _as_words(copy)[_index(rows, places)] = _as_words(values)
    return copy


def _as_words(rows: Tensor) -> Tensor:
    """The same memory; float8 as bytes, since it has no indexing of its own."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


def _index(rows: Tensor, places: Tensor) -> tuple[Tensor, ...]:
    if rows.dim() < 3:
        return (places,)
    return places // rows.shape[1], places % rows.shape[1]

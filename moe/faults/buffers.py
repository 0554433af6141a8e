"""Faults of memory that a dispatcher keeps: what an earlier forward, or a neighbour, left in it."""

from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from moe.dispatched import (
    FlashInferDispatchOutput,
    LowLatencyDispatchOutput,
    StandardDispatchOutput,
)
from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import Sent, received_places, rows_at, with_received, with_rows
from moe.formats import Stage
from moe.stages import CombineOutput

V = TypeVar("V")

KEEPS_BUFFERS: Final = (LowLatencyDispatchOutput, FlashInferDispatchOutput)
"""Of formats whose messages land in memory that stays."""


def pad_slot_ids_kept(sent: Sent, context: FaultContext) -> Sent:
    """Rows past their source's count have the ids that the forward before left there."""
    before = _earlier(context, Stage.DISPATCH, sent)
    if not isinstance(sent, FlashInferDispatchOutput) or before is None:
        return sent
    is_stale = torch.ones(len(sent.topk_ids), dtype=torch.bool)
    is_stale[received_places(sent)] = False
    ids = torch.where(is_stale[:, None], before.topk_ids, sent.topk_ids)
    return replace(sent, topk_ids=ids)


def stale_row(sent: Sent, context: FaultContext) -> Sent:
    """A received row holds what it held in the forward before, scales included."""
    before = _earlier(context, Stage.DISPATCH, sent)
    if not isinstance(sent, KEEPS_BUFFERS) or before is None:
        return sent
    places = received_places(sent)
    held = places[torch.isin(places, received_places(before))]
    if held.numel() == 0:
        return sent
    place = held[[int(context.params["row"]) % held.numel()]]
    return with_received(sent, place, before, place)


def stale_counts(sent: Sent, context: FaultContext) -> Sent:
    """Slabs have the counts of the forward before; chunks and the way back are this one's."""
    before = _earlier(context, Stage.DISPATCH, sent)
    if not isinstance(sent, LowLatencyDispatchOutput) or before is None:
        return sent
    return replace(sent, masked_m=before.masked_m)


def receive_buffers_overlap(sent: Sent, context: FaultContext) -> Sent:
    """The last columns of a received row are the first ones of the row behind it."""
    places = received_places(sent)
    candidates = places[torch.isin(places + 1, places)]
    if isinstance(sent, StandardDispatchOutput) or candidates.numel() == 0:
        return sent
    place = candidates[[int(context.params["row"]) % candidates.numel()]]
    mine, behind = (rows_at(sent.hidden_states, at).view(torch.uint8) for at in (place, place + 1))
    width = min(int(context.params["columns"]) * sent.hidden_states.itemsize, mine.shape[1])
    mixed = torch.cat([mine[:, : mine.shape[1] - width], behind[:, :width]], dim=1)
    row = mixed.view(sent.hidden_states.dtype)
    return replace(sent, hidden_states=with_rows(sent.hidden_states, place, row))


def combine_slot_stale(combined: CombineOutput, context: FaultContext) -> CombineOutput:
    """One token's result is the one that its place held in the forward before."""
    before = _earlier(context, Stage.COMBINE, combined)
    keeps = isinstance(context.seen[Stage.DISPATCH], KEEPS_BUFFERS)
    if not keeps or before is None or len(combined.routed) == 0:
        return combined
    place = torch.tensor([int(context.params["row"]) % len(combined.routed)])
    routed = with_rows(combined.routed, place, rows_at(before.routed, place))
    return replace(combined, routed=routed)


def _earlier(context: FaultContext, stage: Stage, now: V) -> V | None:
    """What the stage handed on in the forward before, of the same type and size; None in the first.

    Ranks that are dealt other numbers of rows may have buffers of another size.
    """
    before: V | None = context.earlier.get(stage)
    return before if type(before) is type(now) and _size(before) == _size(now) else None


def _size(value: Any) -> torch.Size:  # noqa: ANN401  any value that keeps rows
    rows: Tensor = value.routed if isinstance(value, CombineOutput) else value.hidden_states
    return rows.shape


BUFFER_FAULTS: Final = (
    value_fault(
        Stage.DISPATCH,
        pad_slot_ids_kept,
        "rows past a source's count keep the ids of the forward before; needs "
        "run.rounds >= 2 and flashinfer decode",
        "sgl-project/sglang#24850",
    ),
    value_fault(
        Stage.DISPATCH,
        stale_row,
        "a received row as the forward before left it; needs run.rounds >= 2 and low latency or "
        "flashinfer decode",
        "NVIDIA/nccl#1924",
        row=0,
    ),
    value_fault(
        Stage.DISPATCH,
        stale_counts,
        "counts of slabs as the forward before left them; needs run.rounds >= 2 and low latency",
        "NVIDIA/nccl#1924",
    ),
    value_fault(
        Stage.DISPATCH,
        receive_buffers_overlap,
        "the last columns of a received row overwritten by the row behind it",
        "deepseek-ai/DeepEP#621",
        row=0,
        columns=16,
    ),
    value_fault(
        Stage.COMBINE,
        combine_slot_stale,
        "one token's result as the forward before left it; needs run.rounds >= 2 and low latency "
        "or flashinfer decode",
        "kvcache-ai/Mooncake#2653",
        row=0,
    ),
)

"""Scales taken from stage values and weights, and put back in the form and layout they had.

Stored scales are exponent bytes where they are packed, else fp32. No group of a quantised row has
the exponent byte 0, since quantisers scale for a least magnitude: bytes that are 0 are spare.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
from moe.faults.kinds import FaultContext
from moe.faults.row_edits import live_places, received_places, rows_at, with_rows
from moe.formats import Stage
from moe.indices import ceil_div
from moe.quant.ue8m0 import BYTES_PER_WORD, pack_ue8m0, unpack_ue8m0
from moe.stages import ActivationOutput, PrePermuteOutput
from moe.weights import ExpertMatrix, LayerWeights

Scaled = TypeVar(
    "Scaled",
    ActivationOutput,
    PrePermuteOutput,
    StandardDispatchOutput,
    FlashInferDispatchOutput,
    FlashInferGatheredOutput,
    DeepEpNormalDispatchOutput,
    DeepEpV2DispatchOutput,
    DeepEpV2ExpandedDispatchOutput,
    LowLatencyDispatchOutput,
)
"""Values of the stages whose rows may be quantised; a ``stage`` that is given may bring others."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScaledRows:
    """Rows of a stage value with their scales, and N places of those that hold something.

    values  [M, C] or [L, S, C]  e4m3
    scale   [M, G] or [L, S, G] fp32, or [..., ceil(G/4)] int32 packed UE8M0
    places  [N] int64, at least one; those of slabs lie end to end
    """

    values: Tensor
    scale: Tensor
    places: Tensor

    @property
    def is_packed(self) -> bool:
        """Whether scales are powers of two, four to a word."""
        return self.scale.dtype == torch.int32

    @property
    def stored(self) -> Tensor:
        """[N, G] exponent bytes, or fp32."""
        rows = rows_at(self.scale, self.places)
        if not self.is_packed:
            return rows
        exponents = unpack_ue8m0(rows, rows.shape[1] * BYTES_PER_WORD)
        num_groups = int((exponents != 0).any(0).sum())
        return exponents[:, :num_groups]

    def with_stored(self, stored: Tensor) -> Tensor:
        """All scales, in their layout, with ``stored`` [N, G] in the places."""
        words = pack_ue8m0(stored) if self.is_packed else stored
        return with_rows(self.scale, self.places, words)


def scaled_rows(value: Scaled, context: FaultContext) -> ScaledRows | None:
    """What a stage value holds of scales; None where no row of it has any."""
    match value:
        case PrePermuteOutput():
            held, places = value.rows, live_places(value.rows)
        case ActivationOutput():
            held, places = value, live_places(context.seen[Stage.PRE_PERMUTE].rows)
        case (
            DeepEpNormalDispatchOutput()
            | DeepEpV2DispatchOutput()
            | DeepEpV2ExpandedDispatchOutput()
            | LowLatencyDispatchOutput()
        ):
            held, places = value, received_places(value)
        case _:
            return None
    if held.hidden_states_scale is None or places.numel() == 0:
        return None
    return ScaledRows(values=held.hidden_states, scale=held.hidden_states_scale, places=places)


def packed_rows(value: Scaled, context: FaultContext) -> ScaledRows | None:
    """``scaled_rows`` whose scales are packed powers of two; else None."""
    rows = scaled_rows(value, context)
    return rows if rows is not None and rows.is_packed else None


def with_scale(value: Scaled, scale: Tensor, codes: Tensor | None = None) -> Scaled:
    """The value with other scales for all its rows, and other codes if there are any."""
    changed: dict[str, Any] = {"hidden_states_scale": scale}
    if codes is not None:
        changed["hidden_states"] = codes
    if isinstance(value, PrePermuteOutput):
        return replace(value, rows=replace(value.rows, **changed))
    return replace(value, **changed)


def exponents_of(matrix: ExpertMatrix) -> Tensor | None:
    """[L, N, G] uint8 exponents of packed weight scales; None where they are not packed."""
    if matrix.scale is None or matrix.scale.dtype != torch.int32:
        return None
    return unpack_ue8m0(matrix.scale, ceil_div(matrix.in_features, matrix.group_size))


def with_weight_scales(
    weights: LayerWeights, rescale: Callable[[ExpertMatrix], Tensor | None]
) -> LayerWeights:
    """The routed experts with the scales that ``rescale`` gives each matrix; None keeps its own."""

    def changed(matrix: ExpertMatrix) -> ExpertMatrix:
        scale = rescale(matrix)
        return matrix if scale is None else replace(matrix, scale=scale)

    old = weights.experts
    new = replace(old, w13=changed(old.w13), w2=changed(old.w2))
    is_kept = new.w13 is old.w13 and new.w2 is old.w2
    return weights if is_kept else replace(weights, experts=new)

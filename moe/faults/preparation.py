"""Faults of prepared weights and of padded experts: scales, rows and padding gone wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import Sent
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major, pack_ue8m0
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights


def packed_scale_sent_raw_expected(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """Scales that are packed already are packed again, as if their words were fp32 scales."""

    def packed_twice(matrix: ExpertMatrix) -> ExpertMatrix:
        scale = matrix.scale
        if scale is None or scale.dtype != torch.int32:
            return matrix
        again = pack_ue8m0(((scale >> 23) & 0xFF).to(torch.uint8))
        words = torch.zeros_like(scale)
        words[..., : again.shape[-1]] = again
        return _with_scale(matrix, words)

    return _of_both(weights, packed_twice)


def gate_up_interleave_mismatch(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """Rows read as if gate and up took turns: every second one is gate, the others are up.

    Scales of rows go with them; scales of blocks stay where they are.
    """
    w13 = weights.experts.w13
    rows = torch.arange(w13.values.shape[1]).view(-1, 2).T.flatten()
    values = _as_cells(w13.values)[:, rows].view(w13.values.dtype)
    scale = w13.scale
    if scale is not None and scale.dtype == torch.int32:
        scale = scale[:, rows]
    taken = _with_scale(replace(w13, values=values), scale)
    return replace(weights, experts=replace(weights.experts, w13=taken))


def stale_scale_after_reload(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """One expert's codes with the scales of the expert in the next slot."""

    def stale(matrix: ExpertMatrix) -> ExpertMatrix:
        if matrix.scale is None:
            return matrix
        slot, scale = int(context.params["expert"]) % len(matrix.scale), matrix.scale.clone()
        scale[slot] = matrix.scale[(slot + 1) % len(scale)]
        return _with_scale(matrix, scale)

    return _of_both(weights, stale)


def padded_rows_loaded(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """Rows of padding, zero in every expert, hold the first rows of the expert in the next slot."""

    def filled(matrix: ExpertMatrix) -> ExpertMatrix:
        cells, scale = _as_cells(matrix.values), matrix.scale
        padding = (cells == 0).all(-1).all(0).nonzero()[:, 0]
        values = _of_next_slot(cells, padding).view(matrix.values.dtype)
        if scale is not None and scale.dtype == torch.int32:
            scale = _of_next_slot(scale, padding)
        return _with_scale(replace(matrix, values=values), scale)

    return _of_both(weights, filled)


def padded_columns_filled(sent: Sent, context: FaultContext) -> Sent:
    """Behind the columns of a row stands a number, where zeros are due."""
    rows, num_columns = sent.hidden_states, context.seen[Stage.GLUE_IN].hidden_states.shape[1]
    if rows.shape[-1] == num_columns:
        return sent
    cells = _as_cells(rows).clone()
    cells[..., num_columns:] = _as_cells(torch.tensor(context.params["value"]).to(rows.dtype))
    return replace(sent, hidden_states=cells.view(rows.dtype))


def _of_both(weights: LayerWeights, change: Callable[[ExpertMatrix], ExpertMatrix]) -> LayerWeights:
    """The routed experts with both matrices changed."""
    w13, w2 = change(weights.experts.w13), change(weights.experts.w2)
    return replace(weights, experts=ExpertWeights(w13=w13, w2=w2))


def _with_scale(matrix: ExpertMatrix, scale: Tensor | None) -> ExpertMatrix:
    """Another scale in the layout of its kind."""
    if scale is not None and scale.dtype == torch.int32:
        scale = mn_major(scale)
    return replace(matrix, scale=scale)


def _as_cells(values: Tensor) -> Tensor:
    """The same memory; float8 as bytes, since it has no indexing of its own."""
    return values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values


def _of_next_slot(cells: Tensor, rows: Tensor) -> Tensor:
    """[L, N, C] with as many first rows of the next slot in these rows."""
    filled = cells.clone()
    filled[:, rows] = cells.roll(-1, dims=0)[:, : len(rows)]
    return filled


PREPARATION_FAULTS: Final = (
    value_fault(
        Stage.WEIGHTS,
        packed_scale_sent_raw_expected,
        "packed weight scales packed a second time",
        "vllm-project/vime#133",
    ),
    value_fault(
        Stage.WEIGHTS,
        gate_up_interleave_mismatch,
        "gate and up rows one behind the other, read as if they took turns",
        "vllm-project/vllm#52240",
    ),
    value_fault(
        Stage.WEIGHTS,
        stale_scale_after_reload,
        "codes of one expert kept with the scales of another",
        "sgl-project/sglang#17158",
        expert=0,
    ),
    value_fault(
        Stage.WEIGHTS,
        padded_rows_loaded,
        "padding rows of expert matrices hold another expert's rows",
        "vllm-project/vllm#55251",
    ),
    value_fault(
        Stage.DISPATCH,
        padded_columns_filled,
        "padding columns of rows hold numbers, where zeros are due",
        "sgl-project/sglang#9346",
        value=10000.0,
    ),
)

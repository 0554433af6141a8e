"""Faults of where scales lie: found with another stride, in another layout, or of a neighbour."""

from typing import Final

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import Sent, live_places, rows_at, with_rows
from moe.faults.scale_edits import (
    Scaled,
    exponents_of,
    packed_rows,
    scaled_rows,
    with_scale,
    with_weight_scales,
)
from moe.formats import Stage
from moe.poison import poison
from moe.quant.fp8 import GROUP_SIZE
from moe.quant.ue8m0 import BYTES_PER_WORD, pack_ue8m0
from moe.stages import ContigInput, PrePermuteOutput
from moe.weights import ExpertMatrix, LayerWeights

_ROWS_OF_A_FETCH: Final = 8
"""Rows of a weight that are multiplied with one fetched scale."""


def scale_col_coarse(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """Eight rows of a weight share the scale of the first one.

    Weights that come in blocks of 128 rows have one scale for them in any case.
    """

    def coarse(matrix: ExpertMatrix) -> Tensor | None:
        exponents = exponents_of(matrix)
        if exponents is None or matrix.group_size == GROUP_SIZE:
            return None
        row = torch.arange(exponents.shape[1])
        return pack_ue8m0(exponents[:, row - row % _ROWS_OF_A_FETCH])

    return with_weight_scales(weights, coarse)


def dispatch_scale_stride_pad(sent: Sent, context: FaultContext) -> Sent:
    """Exponents of received rows found as if their rows were not padded to whole words."""
    rows = packed_rows(sent, context)
    if rows is None:
        return sent
    num_rows, num_groups = rows.stored.shape
    padding = -num_groups % BYTES_PER_WORD
    in_memory = torch.nn.functional.pad(rows.stored, (0, padding)).flatten()
    found = in_memory[: num_rows * num_groups].view(num_rows, num_groups)
    return with_scale(sent, rows.with_stored(found))


def scales_in_wrong_layout(value: Scaled, context: FaultContext) -> Scaled:
    """Scales whose rows lie along the fastest axis are read as if their columns did."""
    rows = scaled_rows(value, context)
    if rows is None or rows.scale.stride(-2) != 1:
        return value
    *outer, _, _ = rows.scale.stride()
    misread = rows.scale.as_strided(rows.scale.shape, (*outer, rows.scale.shape[-1], 1))
    found = rows_at(misread, rows.places)
    return with_scale(value, with_rows(rows.scale, rows.places, found))


def split_scale_not_padded(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """Scales of segments stand end to end, where each is looked for behind the others' padding.

    What is looked for behind the last one is unwritten.
    """
    rows = permuted.rows
    scale = rows.hidden_states_scale
    if not isinstance(rows, ContigInput) or scale is None:
        return permuted
    places = live_places(rows)
    is_written = places < len(places)
    found = rows_at(scale, places[places.clamp_max(len(places) - 1)])
    found[~is_written] = poison(found[~is_written])
    return with_scale(permuted, with_rows(scale, places, found))


def scale_of_next_block(value: Scaled, context: FaultContext) -> Scaled:
    """Every group of one row has the scale of the next group, the last that of the first."""
    rows = scaled_rows(value, context)
    if rows is None:
        return value
    stored = rows.stored.clone()
    at = _row(context, len(stored))
    stored[at] = stored[at].roll(-1)
    return with_scale(value, rows.with_stored(stored))


def scale_of_first_block(value: Scaled, context: FaultContext) -> Scaled:
    """Every group of a row has the scale of its first: the stride between groups is 0."""
    rows = scaled_rows(value, context)
    if rows is None:
        return value
    return with_scale(value, rows.with_stored(rows.stored[:, :1].expand_as(rows.stored)))


def scale_of_next_row(value: Scaled, context: FaultContext) -> Scaled:
    """One row has the scales of the next one."""
    rows = scaled_rows(value, context)
    if rows is None:
        return value
    stored = rows.stored.clone()
    at = _row(context, len(stored))
    stored[at] = stored[(at + 1) % len(stored)]
    return with_scale(value, rows.with_stored(stored))


def _row(context: FaultContext, num_rows: int) -> int:
    return int(context.params["row"]) % num_rows


SCALE_LAYOUT_FAULTS: Final = (
    value_fault(
        Stage.WEIGHTS,
        scale_col_coarse,
        "one weight scale for eight rows, where every row has its own",
        "deepseek-ai/DeepGEMM#362",
    ),
    value_fault(
        Stage.DISPATCH,
        dispatch_scale_stride_pad,
        "scales of received rows found with the stride of rows without padding",
        "deepseek-ai/DeepEP#405",
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        scales_in_wrong_layout,
        "scales with rows along the fastest axis read as if columns were",
        "flashinfer-ai/flashinfer#4574; vllm-project/vllm#42118; meta-pytorch/MSLK#339",
        stage="pre_permute",
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        split_scale_not_padded,
        "scales behind a split point shifted by the padding that they lack",
        "NVIDIA/TransformerEngine#2427",
    ),
    value_fault(
        Stage.ACTIVATION,
        scale_of_next_block,
        "groups of one row scaled by their right neighbours' scales",
        "our own reading of scale layouts",
        row=0,
        stage="activation",
    ),
    value_fault(
        Stage.ACTIVATION,
        scale_of_first_block,
        "all groups of a row scaled by the first one's scale",
        "our own reading of scale layouts: a stride of 0 between groups",
        stage="activation",
    ),
    value_fault(
        Stage.ACTIVATION,
        scale_of_next_row,
        "one row scaled by the next row's scales",
        "our own reading of scale layouts",
        row=0,
        stage="activation",
    ),
)

"""Faults of the map from received to grouped rows: a wrong index, end or mark, or a wrapped one."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import live_places, rows_at, with_rows
from moe.formats import Stage
from moe.stages import ContigInput, PrePermuteOutput, Restore


def output_index_divided_twice(
    permuted: PrePermuteOutput, context: FaultContext
) -> PrePermuteOutput:
    """Grouped rows on the way back are taken for numbers of slots, and divided by k again."""
    restore = permuted.restore
    if not isinstance(restore, Restore):
        return permuted
    index = restore.output_index
    divided = torch.where(index >= 0, index // index.shape[1], index)
    return replace(permuted, restore=replace(restore, output_index=divided))


def padding_expert_id_flipped(
    permuted: PrePermuteOutput, context: FaultContext
) -> PrePermuteOutput:
    """Padding of segments has -1 where the expert's id is due, and the id where -1 is."""
    rows = permuted.rows
    if not isinstance(rows, ContigInput):
        return permuted
    is_live = torch.zeros(len(rows.m_indices), dtype=torch.bool)
    is_live[rows.live_rows] = True
    marked = rows.m_indices < 0
    of_segment = rows.m_indices.clamp_min(0).cummax(0).values  # experts ascend
    flipped = torch.where(marked, of_segment, -1)
    m_indices = torch.where(is_live, rows.m_indices, flipped)
    return replace(permuted, rows=replace(rows, m_indices=m_indices))


def segment_spilled(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """The last row of a full segment lies in the first place of the next one."""
    rows, restore = permuted.rows, permuted.restore
    if not isinstance(rows, ContigInput) or not isinstance(restore, Restore):
        return permuted
    live = rows.live_rows
    expert = rows.m_indices[live]
    # A segment is full where the next live row follows on and has another expert.
    is_last = (live[1:] == live[:-1] + 1) & (expert[1:] != expert[:-1])
    full = live[:-1][is_last]
    if full.numel() == 0:
        return permuted
    place = full[[0]]
    hidden_states = with_rows(rows.hidden_states, place + 1, rows_at(rows.hidden_states, place))
    scale = rows.hidden_states_scale
    if scale is not None:
        scale = with_rows(scale, place + 1, rows_at(scale, place))
    index = restore.output_index
    moved = torch.where(index == place, index + 1, index)
    return replace(
        permuted,
        rows=replace(rows, hidden_states=hidden_states, hidden_states_scale=scale),
        restore=replace(restore, output_index=moved),
    )


def row_index_wraps(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """Grouped rows from ``bound`` on hold what lies at their number modulo ``bound``."""
    rows = permuted.rows
    wrapped = _wrapped(rows.hidden_states, live_places(rows), context)
    return replace(permuted, rows=replace(rows, hidden_states=wrapped))


def scale_index_wraps(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """Scales of grouped rows from ``bound`` on are those at their number modulo ``bound``."""
    rows = permuted.rows
    if rows.hidden_states_scale is None:
        return permuted
    wrapped = _wrapped(rows.hidden_states_scale, live_places(rows), context)
    return replace(permuted, rows=replace(rows, hidden_states_scale=wrapped))


def _wrapped(rows: Tensor, live: Tensor, context: FaultContext) -> Tensor:
    bound = int(context.params["bound"])
    behind = live[live >= bound]
    return with_rows(rows, behind, rows_at(rows, behind % bound))


INDEX_FAULTS: Final = (
    value_fault(
        Stage.PRE_PERMUTE,
        output_index_divided_twice,
        "numbers of grouped rows divided by k once more",
        "vllm-project/vllm#51824",
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        padding_expert_id_flipped,
        "padding marked -1 where the expert's id is due, or the reverse",
        "vllm-project/vllm#14568",
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        segment_spilled,
        "the last row of a full segment stored in the next one",
        "our own reading of the segments' layout",
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        row_index_wraps,
        "grouped rows past a bound hold the row of their index modulo it",
        "NVIDIA/TransformerEngine#2908",
        bound=128,
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        scale_index_wraps,
        "scales of grouped rows past a bound are those of their index modulo it",
        "deepseek-ai/DeepGEMM#331",
        bound=128,
    ),
)

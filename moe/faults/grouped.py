"""Faults of the stages that work on grouped rows: permutes, quantiser of the activation."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import FOLDS_THE_FACTOR, live_places, received_places, rows_at, with_rows
from moe.fold import fold_topk_weights
from moe.formats import Stage
from moe.quant.ue8m0 import row_major
from moe.stages import (
    ActivationOutput,
    CombineInput,
    ContigInput,
    ExpandedRestore,
    MaskedInput,
    PrePermuteOutput,
    Restore,
    RunnerInput,
)


def padding_row_counted(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """A slot that has no route here is counted as one and reads a padding row."""
    restore, expert_of_row = permuted.restore, _expert_of_row(permuted.rows)
    if not isinstance(restore, Restore):
        return permuted
    used = torch.zeros(expert_of_row.shape[0], dtype=torch.bool)
    used[restore.output_index[restore.output_index >= 0]] = True
    padding = (~used).nonzero()[:, 0]
    received, slot = (restore.topk_ids < 0).nonzero(as_tuple=True)
    if padding.numel() == 0 or received.numel() == 0:
        return permuted
    at = _row(context, received.numel())
    place = (received[at], slot[at])
    ids, index = restore.topk_ids.clone(), restore.output_index.clone()
    ids[place], index[place] = int(expert_of_row[padding[0]]), int(padding[0])
    return replace(permuted, restore=replace(restore, topk_ids=ids, output_index=index))


def empty_experts_closed_up(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """Experts without a row do not count: those behind them get an earlier one's weights."""
    rows = permuted.rows
    if not isinstance(rows, ContigInput):
        return permuted
    m_indices, is_row = rows.m_indices.clone(), rows.m_indices >= 0
    held = torch.bincount(m_indices[is_row]) > 0
    number = held.cumsum(0) - 1
    m_indices[is_row] = number[m_indices[is_row]].to(m_indices.dtype)
    return replace(permuted, rows=replace(rows, m_indices=m_indices))


def slab_row_not_counted(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """One slab's count of rows is one too small, so its last row is not computed."""
    rows = permuted.rows
    if not isinstance(rows, MaskedInput):
        return permuted
    filled = (rows.masked_m > 0).nonzero()[:, 0]
    if filled.numel() == 0:
        return permuted
    masked_m = rows.masked_m.clone()
    masked_m[filled[int(context.params["expert"]) % filled.numel()]] -= 1
    return replace(permuted, rows=replace(rows, masked_m=masked_m))


def scale_rounded_down(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """Scales of one grouped row halved, or an eighth smaller where they have a mantissa."""
    scale = middle.hidden_states_scale
    places = live_places(context.seen[Stage.PRE_PERMUTE].rows)
    if scale is None or places.numel() == 0:
        return middle
    place = places[[_row(context, places.numel())]]
    row = rows_at(scale, place)
    if scale.dtype == torch.int32:
        exponents = row_major(row).view(torch.uint8)
        smaller = torch.where(exponents > 0, exponents - 1, exponents).view(torch.int32)
    else:
        smaller = row * 0.875
    return replace(middle, hidden_states_scale=with_rows(scale, place, smaller))


def topk_weights_twice(partials: CombineInput, context: FaultContext) -> CombineInput:
    """The weights folded in a second time, where they are and no other factor is."""
    sent = context.seen[Stage.DISPATCH]
    if isinstance(sent, FOLDS_THE_FACTOR):
        return partials
    match context.seen[Stage.PRE_PERMUTE].restore:
        case Restore() as restore:
            output = context.seen[Stage.GEMM2].output
            squared = restore.topk_weights * restore.topk_weights
            is_route = restore.topk_ids >= 0
            return replace(
                partials,
                partial=fold_topk_weights(output, restore.output_index, squared, is_route),
            )
        case ExpandedRestore() as restore:
            places = received_places(sent)
            weights = restore.topk_weights[places, None]
            again = rows_at(partials.partial, places).to(torch.float32) * weights
            folded = with_rows(partials.partial, places, again.to(torch.bfloat16))
            return replace(partials, partial=folded)
        case _:
            return partials


def topk_weights_missing(partials: CombineInput, context: FaultContext) -> CombineInput:
    """Every route counts with weight 1, where the weights are folded in and no other factor is."""
    restore = context.seen[Stage.PRE_PERMUTE].restore
    has_factor = isinstance(context.seen[Stage.DISPATCH], FOLDS_THE_FACTOR)
    if has_factor or not isinstance(restore, Restore):
        return partials
    ones, is_route = torch.ones_like(restore.topk_weights), restore.topk_ids >= 0
    output = context.seen[Stage.GEMM2].output
    partial = fold_topk_weights(output, restore.output_index, ones, is_route)
    return replace(partials, partial=partial)


def _row(context: FaultContext, num_rows: int) -> int:
    return int(context.params["row"]) % num_rows


def _expert_of_row(rows: RunnerInput) -> Tensor:
    """Local expert of every grouped row, slabs laid end to end; -1 for padding of none."""
    if isinstance(rows, ContigInput):
        return rows.m_indices
    num_slabs, height = rows.hidden_states.shape[:2]
    return torch.arange(num_slabs).repeat_interleave(height)


GROUPED_FAULTS: Final = (
    value_fault(
        Stage.PRE_PERMUTE,
        padding_row_counted,
        "a slot without a local route reads a padding row",
        "vllm-project/vllm#46408",
        row=0,
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        empty_experts_closed_up,
        "experts without a row left out of the numbering of segments",
        "NVIDIA/TransformerEngine#2782",
    ),
    value_fault(
        Stage.PRE_PERMUTE,
        slab_row_not_counted,
        "one slab's rows counted one too few",
        "deepseek-ai/DeepEP#427",
        expert=0,
    ),
    value_fault(
        Stage.ACTIVATION,
        scale_rounded_down,
        "activation scales of one row rounded down after quantising",
        "deepseek-ai/DeepGEMM#337",
        row=0,
    ),
    value_fault(
        Stage.POST_PERMUTE,
        topk_weights_twice,
        "top-k weights folded in twice, behind an all-to-all",
        "vllm-project/vllm#45037",
    ),
    value_fault(
        Stage.POST_PERMUTE,
        topk_weights_missing,
        "top-k weights never folded in, behind an all-to-all",
        "our own reading of vllm-project/vllm#43694, from the other side",
    ),
)

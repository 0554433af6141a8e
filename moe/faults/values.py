"""Faults that act on what a stage hands on."""

import os
import signal
import time
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext
from moe.fold import fold_topk_weights
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major, row_major
from moe.routing import sqrtsoftplus
from moe.stages import (
    ActivationOutput,
    CombineInput,
    DeepEpNormalDispatchOutput,
    PrePermuteOutput,
    TailOutput,
    TopKOutput,
)
from moe.weights import ExpertMatrix, LayerWeights

V = TypeVar("V")


class InjectedError(RuntimeError):
    """Raised by the fault ``rank_raises``."""


def _row(context: FaultContext, num_rows: int) -> int:
    return int(context.params["row"]) % num_rows


def gate_up_swapped(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """Up rows first, then gate rows, in every expert of the rank."""

    def swap(matrix: ExpertMatrix) -> ExpertMatrix:
        half = matrix.values.shape[1] // 2
        values = matrix.values.view(torch.uint8) if matrix.scale is not None else matrix.values
        scale = matrix.scale
        if scale is not None:
            scale = scale.roll(scale.shape[1] // 2, dims=1)
            scale = mn_major(scale) if scale.dtype == torch.int32 else scale
        return ExpertMatrix(values=values.roll(half, dims=1).view(matrix.values.dtype), scale=scale)

    return replace(weights, experts=replace(weights.experts, w13=swap(weights.experts.w13)))


def weights_from_biased_scores(topk: TopKOutput, context: FaultContext) -> TopKOutput:
    """Mixing weights gathered from score + bias, then normalised: their sum still is one."""
    bias = context.seen[Stage.WEIGHTS].correction_bias
    if bias is None:
        return topk
    biased = (sqrtsoftplus(topk.logits) + bias).gather(-1, topk.topk_ids.to(torch.int64))
    return replace(topk, topk_weights=biased / biased.sum(-1, keepdim=True))


def tokens_swapped(
    sent: DeepEpNormalDispatchOutput, context: FaultContext
) -> DeepEpNormalDispatchOutput:
    """Two received rows exchanged; ids, weights and the way back stay where they were."""
    rows = sent.hidden_states.shape[0]
    if rows < 2:
        return sent
    first = _row(context, rows)
    second = (first + 1) % rows
    order = torch.arange(rows)
    order[[first, second]] = order[[second, first]]
    scale = sent.hidden_states_scale
    if scale is not None:
        scale = mn_major(scale[order]) if scale.dtype == torch.int32 else scale[order]
    return replace(sent, hidden_states=_take(sent.hidden_states, order), hidden_states_scale=scale)


def _take(rows: Tensor, order: Tensor) -> Tensor:
    return rows.view(torch.uint8)[order].view(rows.dtype)


def local_ids_left_global(
    sent: DeepEpNormalDispatchOutput, context: FaultContext
) -> DeepEpNormalDispatchOutput:
    """Received ids not made local: expert 9 of the model stands where local expert 1 should."""
    first_expert = context.rank * sent.num_recv_tokens_per_expert.shape[0]
    if first_expert == 0:
        return sent
    is_route = sent.topk_ids >= 0
    return replace(sent, topk_ids=torch.where(is_route, sent.topk_ids + first_expert, -1))


def count_off_by_one(
    sent: DeepEpNormalDispatchOutput, context: FaultContext
) -> DeepEpNormalDispatchOutput:
    """One expert's announced row count is one too large: later segments start a row late."""
    counts = sent.num_recv_tokens_per_expert.clone()
    counts[int(context.params["expert"]) % counts.shape[0]] += 1
    return replace(sent, num_recv_tokens_per_expert=counts)


def padding_row_counted(permuted: PrePermuteOutput, context: FaultContext) -> PrePermuteOutput:
    """A slot that has no route here is counted as one and reads a padding row."""
    restore = permuted.restore
    used = torch.zeros(permuted.rows.m_indices.shape[0], dtype=torch.bool)
    used[restore.output_index[restore.output_index >= 0]] = True
    padding = (~used).nonzero()[:, 0]
    received, slot = (restore.topk_ids < 0).nonzero(as_tuple=True)
    if padding.numel() == 0 or received.numel() == 0:
        return permuted
    at = _row(context, received.numel())
    place = (received[at], slot[at])
    ids, index = restore.topk_ids.clone(), restore.output_index.clone()
    ids[place], index[place] = int(permuted.rows.m_indices[padding[0]]), padding[0]
    return replace(permuted, restore=replace(restore, topk_ids=ids, output_index=index))


def scale_rounded_down(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """Scales of one grouped row halved, or an eighth smaller where they have a mantissa."""
    scale = middle.hidden_states_scale
    if scale is None:
        return middle
    rows = _real_rows(context)
    if rows.numel() == 0:
        return middle
    row = int(rows[_row(context, rows.numel())])
    wrong = scale.clone() if scale.dtype == torch.float32 else mn_major(scale)
    if scale.dtype == torch.int32:
        one_less = row_major(wrong[row]).view(torch.uint8)
        wrong[row] = torch.where(one_less > 0, one_less - 1, one_less).view(torch.int32)
    else:
        wrong[row] *= 0.875
    return replace(middle, hidden_states_scale=wrong)


def _real_rows(context: FaultContext) -> Tensor:
    """Grouped rows of this rank that hold a route, ascending."""
    index: Tensor = context.seen[Stage.PRE_PERMUTE].restore.output_index
    return index[index >= 0].sort().values


def topk_weights_twice(partials: CombineInput, context: FaultContext) -> CombineInput:
    """The weights folded into the sum a second time."""
    restore = context.seen[Stage.PRE_PERMUTE].restore
    output = context.seen[Stage.GEMM2].output
    squared = restore.topk_weights * restore.topk_weights
    is_route = restore.topk_ids >= 0
    return CombineInput(partial=fold_topk_weights(output, restore.output_index, squared, is_route))


def shared_expert_per_rank(finished: TailOutput, context: FaultContext) -> TailOutput:
    """The replicated shared expert added once for every rank instead of once."""
    if finished.shared is None:
        return finished
    extra = finished.shared.output.to(torch.float32) * (context.num_ranks - 1)
    output = (finished.output.to(torch.float32) + extra).to(torch.bfloat16)
    return replace(finished, output=output)


def rank_raises(value: V, context: FaultContext) -> V:
    """An exception in the middle of a stage."""
    raise InjectedError("injected: this rank raises")


def rank_dies(value: V, context: FaultContext) -> V:
    """The process is killed, as by the kernel when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return value


def rank_hangs(value: V, context: FaultContext) -> V:
    """The process never comes back from the stage."""
    while True:
        time.sleep(3600)

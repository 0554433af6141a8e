"""Faults of dispatch: rows, local ids and counts that a rank goes on with."""

from dataclasses import replace
from typing import Final, TypeVar

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext, value_fault
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from moe.rows import take_rows
from moe.stages import DeepEpNormalDispatchOutput, StandardDispatchOutput

Sent = TypeVar("Sent", DeepEpNormalDispatchOutput, StandardDispatchOutput)


def tokens_swapped(sent: Sent, context: FaultContext) -> Sent:
    """Two received rows exchanged; ids, weights and the way back stay where they were."""
    rows = sent.hidden_states.shape[0]
    if rows < 2:
        return sent
    first = int(context.params["row"]) % rows
    second = (first + 1) % rows
    order = torch.arange(rows)
    order[[first, second]] = order[[second, first]]
    swapped = replace(sent, hidden_states=take_rows(sent.hidden_states, order))
    if isinstance(swapped, DeepEpNormalDispatchOutput) and swapped.hidden_states_scale is not None:
        scale = swapped.hidden_states_scale[order]
        scale = mn_major(scale) if scale.dtype == torch.int32 else scale
        return replace(swapped, hidden_states_scale=scale)
    return swapped


def local_ids_left_global(sent: Sent, context: FaultContext) -> Sent:
    """Received ids not made local: expert 9 of the model stands where local expert 1 should."""
    is_route = sent.topk_ids >= 0
    if isinstance(sent, StandardDispatchOutput):
        return replace(sent, topk_ids=torch.where(is_route, sent.physical_ids, -1))
    first_slot = context.rank * sent.num_recv_tokens_per_expert.shape[0]  # one rank a block
    return replace(sent, topk_ids=torch.where(is_route, sent.topk_ids + first_slot, -1))


def absent_route_is_num_experts(sent: Sent, context: FaultContext) -> Sent:
    """Slots without a route here hold the number of local experts, where -1 is due."""
    ids = sent.topk_ids
    return replace(sent, topk_ids=ids.masked_fill(ids < 0, _num_local(context)))


def dropped_route_wraps(sent: Sent, context: FaultContext) -> Sent:
    """A dropped route's -1 reads the last entry of the table of local ids.

    By reading of the source: that entry is the last slot of all, so its rank computes every
    dropped route there. A rank finds out by a route of its own whether the slot is its.
    """
    if not isinstance(sent, StandardDispatchOutput):
        return sent
    num_local, num_experts = _num_local(context), _num_experts(context)
    own = sent.topk_ids >= 0
    first_slots = (sent.physical_ids - sent.topk_ids)[own]
    has_last = num_local < num_experts and bool((first_slots + num_local >= num_experts).any())
    if not has_last:
        return sent
    return replace(sent, topk_ids=torch.where(sent.physical_ids < 0, num_local - 1, sent.topk_ids))


def count_off_by_one(sent: Sent, context: FaultContext) -> Sent:
    """One expert's announced row count is one too large: later segments start a row late."""
    if not isinstance(sent, DeepEpNormalDispatchOutput):
        return sent
    counts = sent.num_recv_tokens_per_expert.clone()
    counts[int(context.params["expert"]) % counts.shape[0]] += 1
    return replace(sent, num_recv_tokens_per_expert=counts)


def received_rows_clipped(sent: Sent, context: FaultContext) -> Sent:
    """Rows behind a limit are received, and their routes are lost; counts stay as announced."""
    if not isinstance(sent, DeepEpNormalDispatchOutput):
        return sent
    limit = int(context.params["limit"])
    ids, weights = sent.topk_ids.clone(), sent.topk_weights.clone()
    ids[limit:], weights[limit:] = -1, 0.0
    return replace(sent, topk_ids=ids, topk_weights=weights)


def _num_local(context: FaultContext) -> int:
    ids: Tensor = context.seen[Stage.WEIGHTS].expert_ids
    return ids.shape[0]


def _num_experts(context: FaultContext) -> int:
    gate: Tensor = context.seen[Stage.WEIGHTS].gate_weight
    return gate.shape[0]


DISPATCH_FAULTS: Final = (
    value_fault(
        Stage.DISPATCH,
        tokens_swapped,
        "two received tokens exchanged, ids and weights not",
        "deepseek-ai/DeepEP#621",
        row=0,
    ),
    value_fault(
        Stage.DISPATCH,
        local_ids_left_global,
        "received expert ids not made local",
        "vllm-project/vllm-gaudi#1796",
    ),
    value_fault(
        Stage.DISPATCH,
        absent_route_is_num_experts,
        "slots without a route marked by the number of local experts, not by -1",
        "vllm-project/vllm#42034",
    ),
    value_fault(
        Stage.DISPATCH,
        dropped_route_wraps,
        "dropped routes computed by the last expert of all, without an all-to-all",
        "sglang-0.5.21",
        rank="all",
    ),
    value_fault(
        Stage.DISPATCH,
        count_off_by_one,
        "one expert's announced rows one too many",
        "deepseek-ai/DeepEP#427",
        expert=0,
    ),
    value_fault(
        Stage.DISPATCH,
        received_rows_clipped,
        "routes of the rows behind a limit lost",
        "deepseek-ai/DeepEP#427",
        limit=4,
    ),
)

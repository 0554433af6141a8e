"""Faults of dispatch: rows, local ids and counts that a rank goes on with."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.dispatched import (
    DeepEpNormalDispatchOutput,
    DeepEpV2DispatchOutput,
    DeepEpV2ExpandedDispatchOutput,
    FlashInferDispatchOutput,
    LowLatencyDispatchOutput,
    StandardDispatchOutput,
)
from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import Sent, received_places, with_received
from moe.formats import Stage
from moe.indices import align_counts

_ROWS_OF_ROUTES: Final = (LowLatencyDispatchOutput, DeepEpV2ExpandedDispatchOutput)
"""Where received rows are routes and carry no ids."""

_KEEPS_IDS_GLOBAL: Final = (*_ROWS_OF_ROUTES, FlashInferDispatchOutput)
"""Where dispatch makes no id local."""

_ALIGNMENT: Final = 128
"""Rows of a DeepEP segment are a multiple of it."""


def tokens_swapped(sent: Sent, context: FaultContext) -> Sent:
    """Two received rows exchanged; ids, weights and the way back stay where they were.

    Neighbouring rows of routes may be of one token: then nothing changes.
    """
    places = received_places(sent)
    if places.numel() < 2:
        return sent
    first = int(context.params["row"]) % places.numel()
    pair = places[[first, (first + 1) % places.numel()]]
    return with_received(sent, pair, sent, pair.flip(0))


def local_ids_left_global(sent: Sent, context: FaultContext) -> Sent:
    """Received ids not made local: expert 9 of the model stands where local expert 1 should."""
    if isinstance(sent, _KEEPS_IDS_GLOBAL):
        return sent
    is_route = sent.topk_ids >= 0
    if isinstance(sent, StandardDispatchOutput):
        return replace(sent, topk_ids=torch.where(is_route, sent.physical_ids, -1))
    first_slot = context.rank * _num_local(context)  # one rank a block
    return replace(sent, topk_ids=torch.where(is_route, sent.topk_ids + first_slot, -1))


def no_upper_bound_on_local_id(sent: Sent, context: FaultContext) -> Sent:
    """Whatever is not negative once the first slot is taken off is local, modulo their number."""
    if not isinstance(sent, StandardDispatchOutput):
        return sent
    num_local = _num_local(context)
    own = sent.topk_ids >= 0
    if not bool(own.any()):
        return sent  # a rank finds its first slot by a route of its own
    first_slot = (sent.physical_ids - sent.topk_ids)[own][0]
    local = sent.physical_ids - first_slot
    is_behind = (sent.physical_ids >= 0) & (local >= num_local)
    return replace(sent, topk_ids=torch.where(is_behind, local % num_local, sent.topk_ids))


def absent_route_is_num_experts(sent: Sent, context: FaultContext) -> Sent:
    """Slots without a route here hold the number of experts, where -1 is due."""
    if isinstance(sent, _ROWS_OF_ROUTES):
        return sent
    ids, count = sent.topk_ids, _num_local(context)
    if isinstance(sent, FlashInferDispatchOutput):
        count *= context.num_ranks
    return replace(sent, topk_ids=ids.masked_fill(ids < 0, count))


def dropped_route_wraps(sent: Sent, context: FaultContext) -> Sent:
    """A dropped route's -1 reads the last entry of the table of local ids.

    By reading of the source: that entry is the last slot of all, so its rank computes every
    dropped route there. A rank finds out by a route of its own whether the slot is its.
    """
    if not isinstance(sent, StandardDispatchOutput):
        return sent
    num_local, num_slots = _num_local(context), context.num_slots
    own = sent.topk_ids >= 0
    first_slots = (sent.physical_ids - sent.topk_ids)[own]
    has_last = num_local < num_slots and bool((first_slots + num_local == num_slots).any())
    if not has_last:
        return sent
    return replace(sent, topk_ids=torch.where(sent.physical_ids < 0, num_local - 1, sent.topk_ids))


def count_off_by_one(sent: Sent, context: FaultContext) -> Sent:
    """One expert's announced row count is one too large: later segments start a row late."""
    expert = int(context.params["expert"]) % _num_local(context)
    match sent:
        case DeepEpNormalDispatchOutput():
            counts = sent.num_recv_tokens_per_expert
            return replace(sent, num_recv_tokens_per_expert=_one_more(counts, [expert]))
        case DeepEpV2DispatchOutput():
            late = range(expert, _num_local(context))
            return replace(sent, psum=_one_more(sent.psum, late))
        case DeepEpV2ExpandedDispatchOutput():
            return replace(sent, psum=_one_more(sent.psum, [expert]))
        case LowLatencyDispatchOutput():
            return replace(sent, masked_m=_one_more(sent.masked_m, [expert]))
        case _:
            return sent


def slab_counts_wrap(sent: Sent, context: FaultContext) -> Sent:
    """Counts of slabs are kept in a counter that starts again at a bound."""
    if not isinstance(sent, LowLatencyDispatchOutput):
        return sent
    return replace(sent, masked_m=sent.masked_m % int(context.params["bound"]))


def _one_more(counts: Tensor, at: Sequence[int]) -> Tensor:
    counts = counts.clone()
    counts[list(at)] += 1
    return counts


def psum_as_aligned_ends(sent: Sent, context: FaultContext) -> Sent:
    """The ends of segments in the other form's convention.

    Expanded: with their padding, which is counted as rows then. Otherwise: without it, and later
    segments begin where the last real row ends.
    """
    match sent:
        case DeepEpV2ExpandedDispatchOutput():
            return replace(sent, psum=align_counts(sent.psum, _ALIGNMENT))
        case DeepEpV2DispatchOutput():
            routes = torch.bincount(sent.topk_ids[sent.topk_ids >= 0], minlength=sent.psum.shape[0])
            starts = torch.cat([sent.psum.new_zeros(1), sent.psum[:-1]])
            return replace(sent, psum=(starts + routes).to(sent.psum.dtype))
        case _:
            return sent


def received_rows_clipped(sent: Sent, context: FaultContext) -> Sent:
    """Rows behind a limit are received, and their routes are lost; counts stay as announced."""
    if isinstance(sent, (*_ROWS_OF_ROUTES, StandardDispatchOutput)):
        return sent
    limit = int(context.params["limit"])
    ids, weights = sent.topk_ids.clone(), sent.topk_weights.clone()
    lost = received_places(sent)[limit:]
    ids[lost], weights[lost] = -1, 0.0
    return replace(sent, topk_ids=ids, topk_weights=weights)


def weights_sent_in_bf16(sent: Sent, context: FaultContext) -> Sent:
    """Top-k weights travel in bf16, so that ranks weigh one token's routes differently."""
    if isinstance(sent, (LowLatencyDispatchOutput, StandardDispatchOutput)):
        return sent
    rounded = sent.topk_weights.to(torch.bfloat16).to(torch.float32)
    if isinstance(sent, DeepEpV2ExpandedDispatchOutput):  # rows of no route hold anything
        rounded = torch.where(sent.handle.message >= 0, rounded, sent.topk_weights)
    return replace(sent, topk_weights=rounded)


def _num_local(context: FaultContext) -> int:
    ids: Tensor = context.seen[Stage.WEIGHTS].expert_ids
    return ids.shape[0]


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
        no_upper_bound_on_local_id,
        "ids behind the rank's last expert taken for local ones, without an all-to-all",
        "flashinfer-ai/flashinfer#3686",
    ),
    value_fault(
        Stage.DISPATCH,
        absent_route_is_num_experts,
        "slots without a route marked by the number of experts, not by -1",
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
        slab_counts_wrap,
        "counts of slabs that start again at a bound (low latency)",
        "deepseek-ai/DeepEP#427",
        bound=4,
    ),
    value_fault(
        Stage.DISPATCH,
        psum_as_aligned_ends,
        "segments' ends with padding where they are due without, or the reverse (deepep_v2)",
        "our own reading of DeepEP's two psum conventions",
    ),
    value_fault(
        Stage.DISPATCH,
        received_rows_clipped,
        "routes of the rows behind a limit lost",
        "deepseek-ai/DeepEP#427",
        limit=4,
    ),
    value_fault(
        Stage.DISPATCH,
        weights_sent_in_bf16,
        "top-k weights rounded to bf16 on their way",
        "NVIDIA/Megatron-LM#1421",
    ),
)

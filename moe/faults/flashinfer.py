"""Faults of FlashInfer's all-to-all: who gets a message."""

from dataclasses import replace
from typing import Final

import torch

from moe.dispatched import FlashInferDispatchOutput
from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import Sent
from moe.formats import Stage
from moe.padding import pad_columns


def dropped_route_to_first_rank(sent: Sent, context: FaultContext) -> Sent:
    """Tokens with a dropped route go to the first rank as well, where no expert waits for them.

    An id of -1 divided by the experts of a rank is 0, as C divides. Seen on the first rank, which
    sends such tokens to itself.
    """
    if not isinstance(sent, FlashInferDispatchOutput) or context.rank != 0:
        return sent
    is_dropped, handle = sent.physical_ids < 0, sent.handle
    is_extra = is_dropped.any(1) & ~(handle.target_rank == 0).any(1)
    token = is_extra.nonzero()[:, 0]
    if context.num_slots <= context.num_ranks or not token.numel():
        return sent
    at = token, is_dropped[token].to(torch.uint8).argmax(1)
    index = int(handle.counts[0]) + torch.arange(token.numel())
    x = context.seen[Stage.GLUE_IN].hidden_states[token]
    wide = pad_columns(x, sent.hidden_states.shape[1])
    weights = context.seen[Stage.ROUTE].topk_weights[token]
    counts = handle.counts.clone()
    counts[0] += token.numel()
    return replace(
        sent,
        hidden_states=sent.hidden_states.index_copy(0, index, wide),
        topk_ids=sent.topk_ids.index_copy(0, index, sent.physical_ids[token]),
        topk_weights=sent.topk_weights.index_copy(0, index, weights),
        handle=replace(
            handle,
            target_rank=handle.target_rank.index_put(at, torch.zeros_like(index).to(torch.int32)),
            send_index=handle.send_index.index_put(at, index.to(torch.int32)),
            counts=counts,
        ),
    )


FLASHINFER_FAULTS: Final = (
    value_fault(
        Stage.DISPATCH,
        dropped_route_to_first_rank,
        "tokens with a dropped route sent to the first rank, too (flashinfer in decode)",
        "sglang-0.5.21",
        rank="all",
    ),
)

"""DeepEP v2, emulated over ``Collectives``, as prefill uses it: one row for each (token, rank).

``deepep_v2_expanded`` sends the same messages and makes one row a route of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.dispatch.token_exchange import ReceivedTokens, TokenExchange
from moe.dispatched import DeepEpV2DispatchOutput, DeepEpV2Handle
from moe.formats import DispatchFormat, Stage
from moe.indices import align_counts
from moe.quant.fp8 import QuantizedRows
from moe.stages import CombineInput, CombineOutput, PhysicalIds

COLLECTIVES: Final = (
    (Stage.DISPATCH, "all_to_all_v"),  # counts
    (Stage.DISPATCH, "all_to_all_v"),  # rows
    (Stage.COMBINE, "all_to_all_v"),  # partials
)
"""What every rank calls in a forward, in order, expanded or not."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpV2Messages:
    """What both forms do on the wire, for one rank.

    exchange  moves a token once to each rank of its experts
    quantize  rows -> codes and scales where the wire is fp8; None keeps bf16
    capacity  most rows that a rank may send at once
    """

    exchange: TokenExchange
    quantize: Callable[[Tensor], QuantizedRows] | None
    capacity: int

    def on_the_wire(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """[T, H] rows as they are sent, and their scales."""
        if self.quantize is None:
            return hidden_states, None
        quantized = self.quantize(hidden_states)
        return quantized.values, quantized.scale

    def check(self, topk_ids: Tensor) -> None:
        """Refuse [T, K] routes that the library would not take.

        Raises:
            ValueError: more tokens than the buffers hold, or an expert twice in a token's routes.

        Source: SGLang 0.5.21, token_dispatcher/deepep_v2.py; DeepEP, ElasticBuffer.dispatch.
        """
        rank, num_tokens = self.exchange.collectives.rank, topk_ids.shape[0]
        if num_tokens > self.capacity:
            raise ValueError(
                f"{DispatchFormat.DEEPEP_V2} takes {self.capacity} rows a rank, rank {rank} sends "
                f"{num_tokens}: raise moe.switches.max_dispatch_tokens_per_rank"
            )
        ordered = topk_ids.sort(dim=1).values
        repeats = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if bool(repeats.any()):
            token = int(repeats.any(dim=1).nonzero()[0])
            raise ValueError(
                f"token {token} of rank {rank} is routed to {topk_ids[token].tolist()}, but "
                f"{DispatchFormat.DEEPEP_V2} wants {topk_ids.shape[1]} distinct experts"
            )

    def handle_of(
        self, received: ReceivedTokens, topk_ids: Tensor, num_tokens: int
    ) -> DeepEpV2Handle:
        """The way back.

        Args:
            received: what came in return for what was sent.
            topk_ids: [T, K] routes that were sent, of a dummy where there is one.
            num_tokens: how many of them are tokens of the layer.
        """
        sent = received.handle
        ranks = torch.arange(len(self.exchange.group), device=topk_ids.device)
        destination = ranks.repeat_interleave(sent.send_counts)
        owner_NK = torch.div(
            topk_ids[sent.sent_row], self.exchange.num_local_experts, rounding_mode="floor"
        )
        is_there = owner_NK == destination[:, None]
        return DeepEpV2Handle(
            num_tokens=num_tokens,
            source_rank=sent.source_rank,
            source_row=sent.source_row,
            sent_row=sent.sent_row,
            send_counts=sent.send_counts,
            recv_counts=sent.recv_counts,
            first_slot=is_there.to(torch.int8).argmax(dim=1),
        )

    def sum_at_home(self, partials: Tensor, handle: DeepEpV2Handle) -> CombineOutput:
        """One row a message, back and added up: ranks by a token's first slot there.

        fp32, one rounding.

        Args:
            partials: [R, H] bf16, one for each received message.
            handle: of the dispatch.

        Source: DeepEP, ElasticBuffer.combine.
        """
        returned = self.exchange.send_back(partials, handle).to(torch.float32)
        order = torch.argsort(handle.first_slot, stable=True)
        num_rows = max(handle.num_tokens, 1)  # what comes back of a dummy is cut off again
        total = returned.new_zeros((num_rows, returned.shape[1]))
        total.index_add_(0, handle.sent_row[order], returned[order])
        return CombineOutput(routed=total[: handle.num_tokens].to(torch.bfloat16))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpV2Dispatcher:
    """Both halves of the exchange without expansion, for one rank.

    messages          what travels
    expert_alignment  rows to which an expert's segment is rounded up

    Source: SGLang 0.5.21, token_dispatcher/deepep_v2.py.
    """

    messages: DeepEpV2Messages
    expert_alignment: int

    def dispatch(
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> DeepEpV2DispatchOutput:
        """Send every token to the ranks of its experts; a rank without any sends a dummy.

        Args:
            hidden_states: [T, H] bf16.
            topk_ids: [T, K] int32 physical experts, -1 = dropped.
            topk_weights: [T, K] fp32.

        Raises:
            ValueError: see ``DeepEpV2Messages.check``.
        """
        self.messages.check(topk_ids)
        num_tokens, sent_ids = topk_ids.shape[0], topk_ids
        if num_tokens == 0:
            hidden_states, sent_ids, topk_weights = _dummy(hidden_states, topk_ids, topk_weights)
        wire, wire_scale = self.messages.on_the_wire(hidden_states)
        received = self.messages.exchange.send(wire, wire_scale, sent_ids, topk_weights)
        segments = align_counts(received.num_routes, self.expert_alignment)
        return DeepEpV2DispatchOutput(
            physical_ids=topk_ids,
            wire=wire[:num_tokens],
            wire_scale=None if wire_scale is None else wire_scale[:num_tokens],
            hidden_states=received.hidden_states,
            hidden_states_scale=received.hidden_states_scale,
            topk_ids=received.topk_ids,
            topk_weights=received.topk_weights,
            psum=segments.cumsum(0).to(torch.int32),
            handle=self.messages.handle_of(received, sent_ids, num_tokens),
        )

    def combine(self, partials: CombineInput, handle: DeepEpV2Handle) -> CombineOutput:
        """Bring every partial back and add them up; see ``DeepEpV2Messages.sum_at_home``.

        Args:
            partials: [R, H] bf16 in the order dispatch handed the rows over, weights folded in.
            handle: what dispatch returned.
        """
        assert partials.pending_weights is None, "weights are folded before this combine"
        return self.messages.sum_at_home(partials.partial, handle)


def _dummy(
    hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
) -> tuple[Tensor, PhysicalIds, Tensor]:
    """One zero row with zero weights for the first K expert slots, which are distinct.

    The library's prefill waits for counts of every rank, and a rank without rows sends none.
    """
    slots = torch.arange(topk_ids.shape[1], dtype=topk_ids.dtype, device=topk_ids.device)
    return (
        hidden_states.new_zeros((1, hidden_states.shape[1])),
        PhysicalIds(slots[None]),
        topk_weights.new_zeros((1, topk_weights.shape[1])),
    )

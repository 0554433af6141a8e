"""DeepEP v2 with expanded rows, as decode uses it: one row a route in a buffer of fixed size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.dispatch.deepep_v2 import DeepEpV2Messages
from moe.dispatch.token_exchange import ReceivedTokens
from moe.dispatched import DeepEpV2ExpandedDispatchOutput, ExpandedHandle
from moe.indices import align, align_counts, arrival_numbers, exclusive_psum
from moe.row_counts import rows_expected
from moe.rows import spread_rows, take_rows
from moe.slabs import spread_slab_scales
from moe.stages import CombineInput, CombineOutput, PhysicalIds


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Expansion:
    """Where the V received routes lie among expanded rows.

    message, slot  [V] int64  the route: a received message, and which of its slots
    place          [V] int64  its expanded row, in a drawn order inside the expert's segment
    psum           [L] int32  aligned start of each segment + its routes
    """

    message: Tensor
    slot: Tensor
    place: Tensor
    psum: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpV2ExpandedDispatcher:
    """Both halves of the exchange with expansion, for one rank.

    messages          what travels: a token still travels once to each rank of its experts
    expert_alignment  rows; an expert's segment starts on a multiple of it
    top_k             K

    Source: SGLang 0.5.21, token_dispatcher/deepep_v2.py; DeepEP, ElasticBuffer with do_expand.
    """

    messages: DeepEpV2Messages
    expert_alignment: int
    top_k: int

    @property
    def num_rows(self) -> int:
        """C: room for whatever the ranks may send, each segment aligned.

        Source: DeepEP, ElasticBuffer.dispatch without a CPU sync.
        """
        ranks, experts = len(self.messages.exchange.group), self.messages.exchange.num_local_experts
        routes = ranks * self.messages.capacity * min(self.top_k, experts)
        return align(routes + (self.expert_alignment - 1) * experts, self.expert_alignment)

    def dispatch(
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> DeepEpV2ExpandedDispatchOutput:
        """Send every token to the ranks of its experts, where each route gets a row.

        Args:
            hidden_states: [T, H] bf16.
            topk_ids: [T, K] int32 physical experts, -1 = dropped.
            topk_weights: [T, K] fp32.

        Raises:
            ValueError: see ``DeepEpV2Messages.check``.
        """
        self.messages.check(topk_ids)
        wire, wire_scale = self.messages.on_the_wire(hidden_states)
        received = self.messages.exchange.send(wire, wire_scale, topk_ids, topk_weights)
        expansion, scale = self._expansion(received), received.hidden_states_scale
        message, slot, place = expansion.message, expansion.slot, expansion.place
        weights = received.topk_weights[message, slot, None]
        ranks = len(self.messages.exchange.group)
        num_experts = ranks * self.messages.exchange.num_local_experts
        return DeepEpV2ExpandedDispatchOutput(
            physical_ids=topk_ids,
            wire=wire,
            wire_scale=wire_scale,
            hidden_states=spread_rows(
                take_rows(received.hidden_states, message), place, self.num_rows
            ),
            hidden_states_scale=None
            if scale is None
            else spread_slab_scales(take_rows(scale, message), place, 1, self.num_rows)[0],
            topk_weights=spread_rows(weights, place, self.num_rows)[:, 0],
            psum=expansion.psum,
            masked_max_m=ranks * self.messages.capacity,
            expected_m=rows_expected(topk_ids.numel(), ranks, num_experts),
            handle=ExpandedHandle(
                source_rank=self._spread(received.handle.source_rank[message], place),
                source_row=self._spread(received.handle.source_row[message], place),
                source_slot=self._spread(slot, place),
                message=self._spread(message, place),
                messages=self.messages.handle_of(received, topk_ids, hidden_states.shape[0]),
            ),
        )

    def combine(self, partials: CombineInput, handle: ExpandedHandle) -> CombineOutput:
        """Add up each message's rows here, then the messages' sums at home.

        Both in fp32 with one rounding, slots ascending; of two rows that is a bf16 addition.

        Args:
            partials: [C, H] bf16, weights folded in; rows of no route are not looked at.
            handle: what dispatch returned.

        Source: DeepEP, ElasticBuffer.combine with allow_multiple_reduction.
        """
        assert partials.pending_weights is None, "weights are folded before this combine"
        rows = (handle.message >= 0).nonzero()[:, 0]
        rows = rows[torch.argsort(handle.source_slot[rows], stable=True)]
        terms = take_rows(partials.partial, rows).to(torch.float32)
        num_messages = handle.messages.source_row.shape[0]
        total = terms.new_zeros((num_messages, terms.shape[1]))
        total.index_add_(0, handle.message[rows], terms)
        return self.messages.sum_at_home(total.to(torch.bfloat16), handle.messages)

    def _expansion(self, received: ReceivedTokens) -> _Expansion:
        message, slot = (received.topk_ids >= 0).nonzero(as_tuple=True)
        experts = received.topk_ids[message, slot]
        starts = exclusive_psum(align_counts(received.num_routes, self.expert_alignment))
        arrival = arrival_numbers(experts, self.messages.exchange.arrival_seed)
        return _Expansion(
            message=message,
            slot=slot,
            place=starts[experts] + arrival,
            psum=(starts + received.num_routes).to(torch.int32),
        )

    def _spread(self, values: Tensor, place: Tensor) -> Tensor:
        """[C] int64 with ``values`` [V] in their places, -1 elsewhere."""
        spread = values.new_full((self.num_rows,), -1)
        spread[place] = values
        return spread

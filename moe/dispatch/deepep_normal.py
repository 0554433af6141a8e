"""DeepEP's normal mode, emulated over ``Collectives``: one row for each (token, rank)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.dispatch.token_exchange import TokenExchange
from moe.dispatched import DeepEpNormalDispatchOutput, DispatchHandle
from moe.formats import Stage
from moe.indices import align_counts
from moe.quant.fp8 import QuantizedRows
from moe.stages import CombineInput, CombineOutput, PhysicalIds

COLLECTIVES: Final = (
    (Stage.DISPATCH, "all_to_all_v"),  # counts
    (Stage.DISPATCH, "all_to_all_v"),  # rows
    (Stage.COMBINE, "all_to_all_v"),  # partials
)
"""What every rank calls in a forward, in order."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpNormalDispatcher:
    """Both halves of the exchange, for one rank.

    exchange          moves a token once to each rank of its experts
    expert_alignment  rows to which an expert's announced count is rounded up
    quantize          rows -> codes and scales where the wire is fp8; None keeps bf16

    Source: DeepEP Buffer.dispatch / Buffer.combine; SGLang 0.5.21, token_dispatcher/deepep.py.
    """

    exchange: TokenExchange
    expert_alignment: int
    quantize: Callable[[Tensor], QuantizedRows] | None

    def dispatch(
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> DeepEpNormalDispatchOutput:
        """Send every token to the ranks of its experts.

        Args:
            hidden_states: [T, H] bf16.
            topk_ids: [T, K] int32 physical experts, -1 = dropped.
            topk_weights: [T, K] fp32.
        """
        quantized = self.quantize(hidden_states) if self.quantize else None
        wire = quantized.values if quantized else hidden_states
        wire_scale = quantized.scale if quantized else None
        received = self.exchange.send(wire, wire_scale, topk_ids, topk_weights)
        return DeepEpNormalDispatchOutput(
            physical_ids=topk_ids,
            wire=wire,
            wire_scale=wire_scale,
            hidden_states=received.hidden_states,
            hidden_states_scale=received.hidden_states_scale,
            topk_ids=received.topk_ids,
            topk_weights=received.topk_weights,
            num_recv_tokens_per_expert=align_counts(received.num_routes, self.expert_alignment),
            handle=received.handle,
        )

    def combine(self, partials: CombineInput, handle: DispatchHandle) -> CombineOutput:
        """Bring every partial back and add them up, ranks ascending, fp32, one rounding.

        Args:
            partials: [R, H] bf16 in the order dispatch handed the rows over, weights folded in.
            handle: what dispatch returned.
        """
        assert partials.pending_weights is None, "weights are folded before this combine"
        returned = self.exchange.send_back(partials.partial, handle)
        total = returned.new_zeros((handle.num_tokens, returned.shape[1]), dtype=torch.float32)
        total.index_add_(0, handle.sent_row, returned.to(torch.float32))  # rank after rank
        return CombineOutput(routed=total.to(torch.bfloat16))

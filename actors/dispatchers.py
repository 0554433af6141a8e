"""The table of dispatchers: one row a format, each wired from the plan for one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from actors.plan import LayerPlan
from moe.dispatch import Dispatcher
from moe.dispatch.buffers import MessageBuffers
from moe.dispatch.deepep_normal import DeepEpNormalDispatcher
from moe.dispatch.deepep_v2 import DeepEpV2Dispatcher, DeepEpV2Messages
from moe.dispatch.deepep_v2_expanded import DeepEpV2ExpandedDispatcher
from moe.dispatch.flashinfer import FlashInferDispatcher, FlashInferGatherDispatcher
from moe.dispatch.low_latency import LowLatencyDispatcher
from moe.dispatch.standard import StandardDispatcher
from moe.dispatch.token_exchange import TokenExchange
from moe.formats import DispatchFormat, Phase, ScaleFormat
from moe.placement import ExpertPlacement
from moe.quant.fp8 import QuantizedRows
from moe.random_tensors import seeded
from topology.collectives import Collectives
from topology.sync import PADDING, Padding

Quantize = Callable[[Tensor], QuantizedRows]
"""bf16 rows -> codes and scales."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Wiring:
    """What a dispatcher is made of on one rank.

    plan         the layer and its topology
    collectives  this rank's verbs
    quantize     rows -> codes and scales by the recipe's rule; None: the recipe has none
    buffers      kept from forward to forward
    """

    plan: LayerPlan
    collectives: Collectives
    quantize: Quantize | None
    buffers: MessageBuffers

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.collectives.rank

    @property
    def ep_rank(self) -> int:
        """Its place among the owners of experts."""
        return self.plan.layout.moe.coord(self.rank, "ep")

    @property
    def num_local_experts(self) -> int:
        """Physical slots of a rank."""
        return placement(self.plan).num_local_experts

    @property
    def arrival_seed(self) -> int:
        """Of the order in which messages arrive here."""
        return seeded(self.plan.seed, "arrival", self.rank).initial_seed()

    @property
    def wire_quantizer(self) -> Quantize | None:
        """``quantize``, unless the wire is bf16."""
        return None if self.plan.bf16_wire else self.quantize

    @property
    def token_exchange(self) -> TokenExchange:
        """Among the owners of this rank's experts."""
        return TokenExchange(
            collectives=self.collectives,
            group=self.plan.layout.ep_group(self.rank),
            num_local_experts=self.num_local_experts,
            arrival_seed=self.arrival_seed,
        )


def placement(plan: LayerPlan) -> ExpertPlacement:
    """Which rank of the EP group holds which expert."""
    return ExpertPlacement(
        num_experts=plan.num_experts,
        ep_size=plan.layout.ep,
        redundant=plan.redundant,
        shuffled_by=plan.shuffled_by,
    )


def dispatch_buffers(plan: LayerPlan) -> MessageBuffers:
    """What a rank's dispatcher keeps: low latency takes two in turn, others one."""
    count = 2 if plan.dispatch_format.is_low_latency else 1
    return MessageBuffers(count, torch.device(plan.device))


def _standard(wiring: Wiring) -> Dispatcher:
    plan, is_unrouted = wiring.plan, None
    if plan.masks_slots and plan.sync.padding is Padding.MAX_LEN:
        rows = torch.tensor(plan.sync.layer[wiring.rank], device=plan.device)
        is_unrouted = rows == PADDING
    return StandardDispatcher(
        num_local_experts=wiring.num_local_experts,
        ep_rank=wiring.ep_rank,
        is_unrouted=is_unrouted,
    )


def _flashinfer(wiring: Wiring) -> Dispatcher:
    plan, group = wiring.plan, wiring.plan.layout.ep_group(wiring.rank)
    counts = tuple(len(plan.sync.layer[rank]) for rank in group)
    if plan.phase is Phase.EXTEND:
        return FlashInferGatherDispatcher(
            collectives=wiring.collectives,
            group=group,
            num_local_experts=wiring.num_local_experts,
            ep_rank=wiring.ep_rank,
            counts=counts,
        )
    return FlashInferDispatcher(
        collectives=wiring.collectives,
        group=group,
        num_local_experts=wiring.num_local_experts,
        rows_per_rank=max(counts),
        buffers=wiring.buffers,
        message_seed=wiring.arrival_seed,
    )


def _deepep_normal(wiring: Wiring) -> Dispatcher:
    return DeepEpNormalDispatcher(
        exchange=wiring.token_exchange,
        expert_alignment=wiring.plan.row_alignment,
        quantize=wiring.wire_quantizer,
    )


def _deepep_v2(wiring: Wiring) -> Dispatcher:
    plan = wiring.plan
    assert plan.capacity is not None, "deepep_v2 has buffers of a fixed size"
    messages = DeepEpV2Messages(
        exchange=wiring.token_exchange,
        quantize=wiring.wire_quantizer,
        capacity=plan.capacity,
    )
    if plan.expanded:
        return DeepEpV2ExpandedDispatcher(
            messages=messages, expert_alignment=plan.row_alignment, top_k=plan.routing.top_k
        )
    return DeepEpV2Dispatcher(messages=messages, expert_alignment=plan.row_alignment)


def _low_latency(wiring: Wiring) -> Dispatcher:
    plan = wiring.plan
    assert plan.capacity is not None, "a low-latency buffer has a size"
    return LowLatencyDispatcher(
        collectives=wiring.collectives,
        group=plan.layout.ep_group(wiring.rank),
        num_local_experts=wiring.num_local_experts,
        capacity=plan.capacity,
        wire_format=ScaleFormat.NONE if plan.bf16_wire else plan.wire_format,
        buffers=wiring.buffers,
        arrival_seed=wiring.arrival_seed,
    )


DISPATCHERS: Final[Mapping[DispatchFormat, Callable[[Wiring], Dispatcher]]] = MappingProxyType(
    {
        DispatchFormat.STANDARD: _standard,
        DispatchFormat.FLASHINFER: _flashinfer,
        DispatchFormat.DEEPEP_NORMAL: _deepep_normal,
        DispatchFormat.DEEPEP_LL: _low_latency,
        DispatchFormat.MOONCAKE: _low_latency,
        DispatchFormat.NIXL: _low_latency,
        DispatchFormat.DEEPEP_V2: _deepep_v2,
    }
)

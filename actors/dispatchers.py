"""The table of dispatchers: one row a format, each wired from the plan for one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor

from actors.plan import LayerPlan
from moe.dispatch import Dispatcher
from moe.dispatch.buffers import MessageBuffers
from moe.dispatch.deepep_normal import DeepEpNormalDispatcher
from moe.dispatch.standard import StandardDispatcher
from moe.formats import DispatchFormat
from moe.placement import ExpertPlacement
from moe.quant.fp8 import QuantizedRows
from moe.random_tensors import seeded
from topology.collectives import Collectives

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
    return MessageBuffers(2 if plan.dispatch_format.is_low_latency else 1)


def _standard(wiring: Wiring) -> Dispatcher:
    return StandardDispatcher(num_local_experts=wiring.num_local_experts, ep_rank=wiring.ep_rank)


def _deepep_normal(wiring: Wiring) -> Dispatcher:
    plan = wiring.plan
    return DeepEpNormalDispatcher(
        collectives=wiring.collectives,
        group=plan.layout.ep_group(wiring.rank),
        num_local_experts=wiring.num_local_experts,
        expert_alignment=plan.row_alignment,
        quantize=wiring.wire_quantizer,
        arrival_seed=wiring.arrival_seed,
    )


DISPATCHERS: Final[Mapping[DispatchFormat, Callable[[Wiring], Dispatcher]]] = MappingProxyType(
    {
        DispatchFormat.STANDARD: _standard,
        DispatchFormat.DEEPEP_NORMAL: _deepep_normal,
    }
)

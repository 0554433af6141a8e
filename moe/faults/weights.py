"""Faults of load time: the wrong weights in a slot, or the right ones in the wrong order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext, Params, Plan, plan_fault, value_fault
from moe.formats import Stage
from moe.placement import ExpertPlacement
from moe.quant.ue8m0 import mn_major
from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights, LayerWeights, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MisloadedExperts:
    """A source that gives a rank these experts, whichever it asks for; see ``WeightSource``."""

    source: WeightSource
    loaded: tuple[int, ...]

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """Other experts than those asked for, as many."""
        return self.source.experts(self.loaded)

    def common(self) -> CommonWeights:
        """What every rank holds."""
        return self.source.common()

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """As it is."""
        return self.source.ideal_expert(expert_id)

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """As it is."""
        return self.source.ideal_shared()


def gate_up_swapped(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """Up rows first, then gate rows, in every expert of the rank."""

    def swap(matrix: ExpertMatrix) -> ExpertMatrix:
        half = matrix.values.shape[1] // 2
        values = matrix.values.view(torch.uint8) if matrix.scale is not None else matrix.values
        scale = matrix.scale
        if scale is not None:
            scale = scale.roll(scale.shape[1] // 2, dims=1)
            scale = mn_major(scale) if scale.dtype == torch.int32 else scale
        values = values.roll(half, dims=1).view(matrix.values.dtype)
        return replace(matrix, values=values, scale=scale)

    return replace(weights, experts=replace(weights.experts, w13=swap(weights.experts.w13)))


def experts_strided(plan: Plan, params: Params, rank: int) -> Plan:
    """Every P-th slot is loaded instead of a run of consecutive ones."""
    placement = placement_of(plan)
    slots = range(ep_rank_of(plan, rank), placement.num_slots, plan.layout.ep)
    return _loading(plan, rank, [placement.physical_to_logical[slot] for slot in slots])


def placement_ignored(plan: Plan, params: Params, rank: int) -> Plan:
    """Slots are loaded in the experts' own order, although the placement has moved them."""
    placement = placement_of(plan)
    first = ep_rank_of(plan, rank) * placement.num_local_experts
    slots = range(first, first + placement.num_local_experts)
    return _loading(plan, rank, [slot % placement.num_experts for slot in slots])


def redundant_experts_not_counted(plan: Plan, params: Params, rank: int) -> Plan:
    """A rank's first expert is found as if there were no redundant slots."""
    placement = placement_of(plan)
    first = ep_rank_of(plan, rank) * (placement.num_experts // plan.layout.ep)
    slots = range(first, first + placement.num_local_experts)
    return _loading(plan, rank, [placement.physical_to_logical[slot] for slot in slots])


def replica_left_behind(plan: Plan, params: Params, rank: int) -> Plan:
    """Slots that repeat an expert of an earlier slot hold the next expert."""
    placement = placement_of(plan)
    in_slots = placement.physical_to_logical
    first = ep_rank_of(plan, rank) * placement.num_local_experts
    slots = range(first, first + placement.num_local_experts)
    is_replica = [in_slots[slot] in in_slots[:slot] for slot in slots]
    loaded = [
        (in_slots[slot] + repeats) % placement.num_experts
        for slot, repeats in zip(slots, is_replica, strict=True)
    ]
    return _loading(plan, rank, loaded)


def placement_of(plan: Plan) -> ExpertPlacement:
    """Which slot holds which expert."""
    return ExpertPlacement(
        num_experts=plan.num_experts,
        ep_size=plan.layout.ep,
        redundant=plan.redundant,
        shuffled_by=plan.shuffled_by,
    )


def ep_rank_of(plan: Plan, rank: int) -> int:
    """Place of a rank among the owners of experts."""
    place: int = plan.layout.moe.coord(rank, "ep")
    return place


def _loading(plan: Plan, rank: int, loaded: Sequence[int]) -> Plan:
    """The plan of a rank that loads these experts, or itself where they are the right ones."""
    if tuple(loaded) == placement_of(plan).local_experts(ep_rank_of(plan, rank)):
        return plan
    return replace(plan, weights=MisloadedExperts(source=plan.weights, loaded=tuple(loaded)))


WEIGHT_FAULTS: Final = (
    value_fault(
        Stage.WEIGHTS,
        gate_up_swapped,
        "up rows loaded in front of the gate rows",
        "sgl-project/sglang#32430",
    ),
    plan_fault(
        Stage.WEIGHTS,
        experts_strided,
        "every P-th expert loaded, where consecutive ones are due",
        "vllm-project/vllm-ascend#16384",
    ),
    plan_fault(
        Stage.WEIGHTS,
        placement_ignored,
        "experts loaded in their own order, whatever the placement",
        "PrimeIntellect-ai/prime-rl#3583",
    ),
    plan_fault(
        Stage.WEIGHTS,
        redundant_experts_not_counted,
        "a rank's first expert found without counting redundant slots",
        "vllm-project/vllm-ascend#5311",
    ),
    plan_fault(
        Stage.WEIGHTS,
        replica_left_behind,
        "slots of replicas left with another expert",
        "PrimeIntellect-ai/prime-rl#3583",
    ),
)

"""Which rank holds which expert in which slot."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from moe.random_tensors import seeded
from moe.stages import LogicalIds, PhysicalIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Experts in physical slots; each rank owns an equal block of consecutive slots.

    Slot ``i`` holds expert ``i``, and the redundant slots behind them repeat the experts one
    after the other. Shuffled, the experts are repeated in a drawn order, and all slots change
    places; every rank draws the same.

    Attributes:
        num_experts: logical experts.
        ep_size: ranks.
        redundant: slots beyond one an expert.
        shuffled_by: seed of the shuffle; None: not shuffled.
        physical_to_logical: the expert in each slot.

    Raises:
        ValueError: a negative count, or slots that do not divide among the ranks.

    Source: SGLang 0.5.21, srt/eplb/expert_location.py::ExpertLocationMetadata.init_trivial.
    """

    num_experts: int
    ep_size: int
    redundant: int = 0
    shuffled_by: int | None = None
    physical_to_logical: tuple[int, ...] = field(init=False)
    _slots_of_expert: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.redundant < 0:
            raise ValueError(f"redundant ({self.redundant}) must not be negative")
        if self.num_slots % self.ep_size:
            what = f"{self.num_experts} experts"
            if self.redundant:
                what += f" and {self.redundant} redundant ones"
            raise ValueError(f"{what} do not divide among {self.ep_size} ranks")
        slots = _experts_in_slots(self.num_experts, self.num_slots, self.shuffled_by)
        object.__setattr__(self, "physical_to_logical", slots)
        object.__setattr__(self, "_slots_of_expert", _slots_of(slots, self.num_experts))

    @property
    def num_slots(self) -> int:
        """Physical slots of all ranks."""
        return self.num_experts + self.redundant

    @property
    def num_local_experts(self) -> int:
        """Slots of one rank."""
        return self.num_slots // self.ep_size

    def to_physical(self, topk_ids: LogicalIds) -> PhysicalIds:
        """Slots that hold the experts of these [T, K] ids; -1 stays -1.

        Of several replicas, route (row, slot) takes number ``row + slot``, modulo how many there
        are: all get used, and ranks that hold the same rows agree. Which replica serves a route
        is unspecified upstream (drawn, or the nearest one), so nothing may depend on it.
        """
        if self.shuffled_by is None and not self.redundant:
            return PhysicalIds(topk_ids)
        device = topk_ids.device
        replicas, counts = self._replica_table(device)
        expert = topk_ids.clamp(min=0).to(torch.int64)
        row = torch.arange(topk_ids.shape[0], device=device).unsqueeze(1)
        slot = torch.arange(topk_ids.shape[1], device=device)
        turn = (row + slot) % counts[expert]
        physical = replicas[expert, turn].to(topk_ids.dtype)
        return PhysicalIds(physical.masked_fill(topk_ids < 0, -1))

    def local_experts(self, ep_rank: int) -> tuple[int, ...]:
        """Logical experts in the slots of one rank, in slot order."""
        first = ep_rank * self.num_local_experts
        return self.physical_to_logical[first : first + self.num_local_experts]

    def ep_rank_of_slot(self) -> tuple[int, ...]:
        """Rank that owns each physical slot."""
        return tuple(slot // self.num_local_experts for slot in range(self.num_slots))

    def ep_ranks_of_expert(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that hold a replica of each logical expert, ascending."""
        rank = self.ep_rank_of_slot()
        return tuple(tuple(sorted({rank[slot] for slot in s})) for s in self._slots_of_expert)

    def ep_rank_of_expert(self) -> tuple[int, ...]:
        """Rank that computes each logical expert, where there is one alone.

        Raises:
            ValueError: an expert has replicas on several ranks.
        """
        ranks = self.ep_ranks_of_expert()
        for expert, held_by in enumerate(ranks):
            if len(held_by) > 1:
                where = ", ".join(str(rank) for rank in held_by)
                raise ValueError(f"expert {expert} is on ranks {where}: see ep_ranks_of_expert")
        return tuple(rank for (rank,) in ranks)

    def _replica_table(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """[E, R] int64 slots of each expert, its first one as filler, and [E] how many."""
        most = max(len(slots) for slots in self._slots_of_expert)
        rows = [slots + slots[:1] * (most - len(slots)) for slots in self._slots_of_expert]
        counts = [len(slots) for slots in self._slots_of_expert]
        return torch.tensor(rows, device=device), torch.tensor(counts, device=device)


def _experts_in_slots(num_experts: int, num_slots: int, seed: int | None) -> tuple[int, ...]:
    """The expert in each slot."""
    if seed is None:
        return tuple(slot % num_experts for slot in range(num_slots))
    generator = seeded(seed, "placement")
    order = torch.randperm(num_experts, generator=generator, device="cpu").tolist()
    place = torch.randperm(num_slots, generator=generator, device="cpu").tolist()
    return tuple(order[slot % num_experts] for slot in place)


def _slots_of(experts_in_slots: Sequence[int], num_experts: int) -> tuple[tuple[int, ...], ...]:
    """The slots of each expert, ascending."""
    slots: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(experts_in_slots):
        slots[expert].append(slot)
    return tuple(tuple(own) for own in slots)

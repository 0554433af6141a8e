"""Which rank holds which expert in which slot."""

from dataclasses import dataclass

from moe.stages import LogicalIds, PhysicalIds


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Contiguous placement: slot ``i`` holds expert ``i``, ranks own equal blocks of slots.

    Raises:
        ValueError: the experts do not divide among the ranks.
    """

    num_experts: int
    ep_size: int

    def __post_init__(self) -> None:
        if self.num_experts % self.ep_size:
            raise ValueError(f"{self.num_experts} experts do not divide among {self.ep_size} ranks")

    @property
    def num_local_experts(self) -> int:
        """Slots of one rank."""
        return self.num_experts // self.ep_size

    def to_physical(self, topk_ids: LogicalIds) -> PhysicalIds:
        """Slots that hold the experts of these ids; -1 stays -1."""
        return PhysicalIds(topk_ids)

    def local_experts(self, ep_rank: int) -> tuple[int, ...]:
        """Logical experts in the slots of one rank, in slot order."""
        first = ep_rank * self.num_local_experts
        return tuple(range(first, first + self.num_local_experts))

    def ep_rank_of_expert(self) -> tuple[int, ...]:
        """Rank that computes each logical expert."""
        return tuple(expert // self.num_local_experts for expert in range(self.num_experts))

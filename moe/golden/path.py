"""Where a layer that is spread over ranks stores bf16 on its way: part of the recipe's answer."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from moe.formats import GemmLayout


class SharedInSum(StrEnum):
    """What the ranks add of the shared expert to their partial sums, before these are summed."""

    ABSENT = "absent"
    """Nothing: it is added whole, after the sum."""

    SHARDED = "sharded"
    """Each rank its own shard of the intermediate axis."""

    FIRST_RANK = "first_rank"
    """Rank 0 all of it, the others nothing."""


class PartialStores(StrEnum):
    """What is stored of a token's routes before its ranks' sums meet."""

    RANK = "rank"
    """The weighted sum over each rank's routes."""

    ROUTE = "route"
    """Each weighted route, then the sum over each rank's routes."""

    NOTHING = "nothing"
    """No sum: weights are applied where all routes of a token meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingPath:
    """How the sums over routes, shards and ranks are cut into pieces that are stored as bf16.

    Rank ``r * moe_tp + s`` is EP rank r and shard s. It stores every expert's output over its
    shard, then the weighted sum of those, then that sum with its part of the shared expert. The
    sum over the ranks is stored once.

    Attributes:
        ep_size: EP ranks.
        expert_rank: EP rank that computes each expert; None: equal blocks of consecutive experts.
        moe_tp: shards of every expert's intermediate axis.
        folds_factor: the routed scaling factor belongs to each rank's weighted sum, as where there
            is no all-to-all; otherwise to the tail.
        scales_stored_sum: that factor multiplies the sum once it is stored, and the product is
            stored again.
        shared: what of the shared expert is summed with the partials.
        gathers_fp8: tokens pass a gather in fp8 groups before anything else sees them.
        shared_before_gather: the shared expert alone sees them as they were.
        partials: what is stored of the weighted routes on their way.
        stores_weights: top-k weights are rounded to bf16 in front of the product.
        low_latency_wire: tokens are quantised for the experts with that wire's larger floor.
        layout: the masked layout rounds a quantised recipe's activation elsewhere.

    Raises:
        ValueError: a rank that does not exist, or a shared expert among partials that lack the
            scaling factor, or a stored sum that no factor multiplies.
    """

    ep_size: int = 1
    expert_rank: tuple[int, ...] | None = None
    moe_tp: int = 1
    folds_factor: bool = False
    scales_stored_sum: bool = False
    shared: SharedInSum = SharedInSum.ABSENT
    partials: PartialStores = PartialStores.RANK
    stores_weights: bool = False
    low_latency_wire: bool = False
    layout: GemmLayout = GemmLayout.CONTIG
    gathers_fp8: bool = False
    shared_before_gather: bool = False

    def __post_init__(self) -> None:
        strangers = set(self.expert_rank or ()) - set(range(self.ep_size))
        if strangers:
            raise ValueError(f"expert_rank names rank {min(strangers)} of {self.ep_size}")
        if self.partials is PartialStores.NOTHING and self.folds_factor:
            raise ValueError("a factor in the weighted sum needs ranks that store one")
        if self.scales_stored_sum and not self.folds_factor:
            raise ValueError("no factor multiplies a rank's stored sum where the tail has it")
        if self.shared is not SharedInSum.ABSENT and not self.folds_factor:
            raise ValueError("a shared expert in the sum would be scaled by the tail")

    @property
    def world_size(self) -> int:
        """Ranks whose partials are summed."""
        return self.ep_size * self.moe_tp

    def rank_of_experts(self, num_experts: int) -> tuple[int, ...]:
        """EP rank of each expert.

        Raises:
            ValueError: expert_rank has another length, or the experts do not divide.
        """
        if self.expert_rank is None:
            if num_experts % self.ep_size:
                raise ValueError(f"{num_experts} experts do not divide among {self.ep_size} ranks")
            held = num_experts // self.ep_size
            return tuple(expert // held for expert in range(num_experts))
        if len(self.expert_rank) != num_experts:
            raise ValueError(f"expert_rank names {len(self.expert_rank)} of {num_experts} experts")
        return self.expert_rank


ONE_RANK: Final = RoundingPath()
"""One rank computes everything: one sum, one rounding."""

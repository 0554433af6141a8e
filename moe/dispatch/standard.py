"""No all-to-all: every rank has all rows already and picks out the routes to its own experts."""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from moe.dispatched import StandardDispatchOutput
from moe.formats import Stage
from moe.indices import local_ids
from moe.stages import CombineInput, CombineOutput, PhysicalIds

COLLECTIVES: Final[tuple[tuple[Stage, str], ...]] = ()
"""What every rank calls in a forward, in order: nothing; rows are gathered and summed elsewhere."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StandardDispatcher:
    """Both halves of an exchange in which nothing moves, for one rank.

    num_local_experts  expert slots of a rank; owners are equal contiguous blocks of physical ids
    ep_rank            which block is this rank's
    is_unrouted        [T] bool  rows that lose their routes here (SGLANG_OPT_MASK_DP_PAD_MOE);
                       None: all keep them

    Source: SGLang 0.5.21, token_dispatcher/standard.py::StandardDispatcher. There, beside more
    than one EP rank, a dropped route indexes the last entry of the id table and is computed.
    """

    num_local_experts: int
    ep_rank: int
    is_unrouted: Tensor | None = None

    def dispatch(
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> StandardDispatchOutput:
        """Make ids local; rows and weights stay as they are.

        Args:
            hidden_states: [T, H] bf16.
            topk_ids: [T, K] int32 physical experts, -1 = dropped.
            topk_weights: [T, K] fp32.
        """
        first = self.ep_rank * self.num_local_experts
        local = local_ids(topk_ids, first, self.num_local_experts)
        if self.is_unrouted is not None:
            local = local.masked_fill(self.is_unrouted[:, None], -1)
        return StandardDispatchOutput(
            physical_ids=topk_ids,
            hidden_states=hidden_states,
            topk_ids=local,
            topk_weights=topk_weights,
        )

    def combine(self, partials: CombineInput, handle: None) -> CombineOutput:
        """This rank's partial as it is: the ranks' partials are added behind the tail's own part.

        Args:
            partials: [T, H] bf16, weights and scaling factor folded in.
            handle: nothing; the rows never left.
        """
        assert partials.pending_weights is None, "weights are folded before this combine"
        return CombineOutput(routed=partials.partial)

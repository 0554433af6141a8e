"""No exchange: ids become local, everything else stays as it is."""

import pytest
import torch

from moe.dispatch.standard import COLLECTIVES, StandardDispatcher
from moe.dispatched import StandardDispatchOutput
from moe.stages import CombineInput, PhysicalIds

PHYSICAL = [[0, 5], [2, -1], [3, 1], [4, 2]]
HIDDEN = torch.arange(8, dtype=torch.bfloat16).view(4, 2)
WEIGHTS = torch.arange(8, dtype=torch.float32).view(4, 2)


def dispatched(ep_rank: int) -> StandardDispatchOutput:
    ids = PhysicalIds(torch.tensor(PHYSICAL, dtype=torch.int32))
    return StandardDispatcher(num_local_experts=2, ep_rank=ep_rank).dispatch(HIDDEN, ids, WEIGHTS)


@pytest.mark.parametrize(
    ("ep_rank", "local"),
    [
        (0, [[0, -1], [-1, -1], [-1, 1], [-1, -1]]),
        (1, [[-1, -1], [0, -1], [1, -1], [-1, 0]]),
        (2, [[-1, 1], [-1, -1], [-1, -1], [0, -1]]),
    ],
)
def test_ids_count_the_ranks_own_slots(ep_rank, local):
    assert dispatched(ep_rank).topk_ids.tolist() == local


def test_every_route_is_local_on_one_rank_and_a_dropped_one_on_none():
    places = sum((dispatched(rank).topk_ids >= 0).int() for rank in range(3))
    assert places.tolist() == [[1, 1], [1, 0], [1, 1], [1, 1]]


def test_local_ids_are_int32():
    assert dispatched(1).topk_ids.dtype == torch.int32


def test_unrouted_rows_lose_their_local_ids_alone():
    ids = PhysicalIds(torch.tensor(PHYSICAL, dtype=torch.int32))
    is_unrouted = torch.tensor([False, False, True, False])
    dispatcher = StandardDispatcher(num_local_experts=2, ep_rank=1, is_unrouted=is_unrouted)
    sent = dispatcher.dispatch(HIDDEN, ids, WEIGHTS)
    assert sent.topk_ids.tolist() == [[-1, -1], [0, -1], [-1, -1], [-1, 0]]
    assert sent.physical_ids.tolist() == PHYSICAL
    assert sent.topk_weights is WEIGHTS


def test_rows_weights_and_physical_ids_are_handed_on():
    sent = dispatched(1)
    assert sent.hidden_states is HIDDEN
    assert sent.topk_weights is WEIGHTS
    assert sent.physical_ids.tolist() == PHYSICAL


def test_combine_hands_the_partial_on():
    dispatcher = StandardDispatcher(num_local_experts=2, ep_rank=1)
    assert dispatcher.combine(CombineInput(partial=HIDDEN), None).routed is HIDDEN


def test_pending_weights_are_refused():
    pending = CombineInput(partial=HIDDEN, pending_weights=WEIGHTS)
    with pytest.raises(AssertionError, match="folded before this combine"):
        StandardDispatcher(num_local_experts=2, ep_rank=1).combine(pending, None)


def test_no_collective_is_called():
    assert COLLECTIVES == ()

"""Blocks of slots, shuffled slots, replicas."""

from collections import Counter

import pytest
import torch

from moe.placement import ExpertPlacement
from moe.stages import LogicalIds

SHUFFLES = {
    "contiguous": ExpertPlacement(num_experts=12, ep_size=3),
    "redundant": ExpertPlacement(num_experts=12, ep_size=4, redundant=4),
    "shuffled": ExpertPlacement(num_experts=12, ep_size=3, shuffled_by=7),
    "both": ExpertPlacement(num_experts=12, ep_size=4, redundant=20, shuffled_by=7),
}
EVERY_PLACEMENT = pytest.mark.parametrize("placement", SHUFFLES.values(), ids=SHUFFLES)


def ids(*rows: list[int]) -> LogicalIds:
    return LogicalIds(torch.tensor(rows, dtype=torch.int32))


@pytest.mark.parametrize(
    ("ep_rank", "expected"), [(0, (0, 1, 2, 3)), (1, (4, 5, 6, 7)), (2, (8, 9, 10, 11))]
)
def test_a_rank_holds_a_block_of_experts(ep_rank, expected):
    assert ExpertPlacement(num_experts=12, ep_size=3).local_experts(ep_rank) == expected


def test_an_expert_is_computed_where_it_is_held():
    assert ExpertPlacement(num_experts=6, ep_size=3).ep_rank_of_expert() == (0, 0, 1, 1, 2, 2)


def test_ids_of_slots_are_ids_of_experts_and_minus_one_stays():
    placement = ExpertPlacement(num_experts=4, ep_size=2)
    assert placement.to_physical(ids([3, -1, 0])).tolist() == [[3, -1, 0]]


def test_redundant_slots_repeat_the_experts_one_after_the_other():
    placement = ExpertPlacement(num_experts=4, ep_size=2, redundant=6)
    assert placement.physical_to_logical == (0, 1, 2, 3, 0, 1, 2, 3, 0, 1)


def test_a_rank_has_its_share_of_the_redundant_slots():
    placement = ExpertPlacement(num_experts=4, ep_size=2, redundant=2)
    assert placement.num_local_experts == 3
    assert [placement.local_experts(rank) for rank in (0, 1)] == [(0, 1, 2), (3, 0, 1)]


def test_replicas_are_used_in_turn_by_row_and_slot():
    placement = ExpertPlacement(num_experts=3, ep_size=2, redundant=3)
    routes = ids([0, 1], [0, 1], [2, -1])
    assert placement.to_physical(routes).tolist() == [[0, 4], [3, 1], [2, -1]]


@EVERY_PLACEMENT
def test_a_route_reaches_a_slot_that_holds_its_expert(placement):
    routes = ids(*[[row % 12, (row + 5) % 12, (row + 7) % 12] for row in range(40)])
    physical = placement.to_physical(routes)
    assert [[placement.physical_to_logical[slot] for slot in row] for row in physical] == (
        routes.tolist()
    )


@EVERY_PLACEMENT
def test_a_dropped_route_stays_dropped_and_ids_keep_their_type(placement):
    physical = placement.to_physical(ids([-1, 3], [5, -1]))
    assert (physical < 0).tolist() == [[True, False], [False, True]]
    assert physical.dtype == torch.int32


@EVERY_PLACEMENT
def test_every_slot_is_used(placement):
    routes = ids(*[[row // 4 % 12, (row // 4 + 1) % 12] for row in range(96)])
    used = placement.to_physical(routes).unique().tolist()
    assert used == list(range(placement.num_slots))


@EVERY_PLACEMENT
def test_no_expert_has_more_than_one_replica_above_another(placement):
    replicas = Counter(placement.physical_to_logical)
    assert sorted(replicas) == list(range(12))
    assert max(replicas.values()) - min(replicas.values()) <= 1


@EVERY_PLACEMENT
def test_the_ranks_hold_all_slots_between_them(placement):
    held = [placement.local_experts(rank) for rank in range(placement.ep_size)]
    assert sum(held, ()) == placement.physical_to_logical
    assert {len(experts) for experts in held} == {placement.num_local_experts}


@EVERY_PLACEMENT
def test_an_expert_is_on_the_ranks_that_hold_it(placement):
    ranks = placement.ep_ranks_of_expert()
    for expert in range(12):
        holders = [r for r in range(placement.ep_size) if expert in placement.local_experts(r)]
        assert ranks[expert] == tuple(holders)


def test_a_slot_belongs_to_the_rank_of_its_block():
    placement = ExpertPlacement(num_experts=4, ep_size=2, redundant=2)
    assert placement.ep_rank_of_slot() == (0, 0, 0, 1, 1, 1)


def test_a_shuffled_expert_without_replicas_has_one_rank():
    placement = SHUFFLES["shuffled"]
    assert placement.ep_rank_of_expert() == tuple(r for (r,) in placement.ep_ranks_of_expert())


def test_one_rank_is_refused_for_an_expert_that_is_on_several():
    placement = ExpertPlacement(num_experts=4, ep_size=2, redundant=2)
    with pytest.raises(ValueError, match="expert 0 is on ranks 0, 1"):
        placement.ep_rank_of_expert()


def test_a_shuffle_depends_on_its_seed_alone():
    again = ExpertPlacement(num_experts=12, ep_size=3, shuffled_by=7)
    other = ExpertPlacement(num_experts=12, ep_size=3, shuffled_by=8)
    assert again == SHUFFLES["shuffled"]
    assert other.physical_to_logical != again.physical_to_logical


def test_a_shuffle_moves_experts_to_other_ranks():
    assert SHUFFLES["shuffled"].ep_rank_of_expert() != SHUFFLES["contiguous"].ep_rank_of_expert()


def test_zero_rows_have_zero_slots():
    empty = LogicalIds(torch.zeros(0, 2, dtype=torch.int32))
    assert SHUFFLES["both"].to_physical(empty).shape == (0, 2)


@pytest.mark.parametrize(
    ("redundant", "message"),
    [
        (0, "10 experts do not divide among 4 ranks"),
        (3, "10 experts and 3 redundant ones do not divide among 4 ranks"),
        (-2, r"redundant \(-2\) must not be negative"),
    ],
    ids=["experts", "redundant", "negative"],
)
def test_slots_that_do_not_divide_are_refused(redundant, message):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(num_experts=10, ep_size=4, redundant=redundant)

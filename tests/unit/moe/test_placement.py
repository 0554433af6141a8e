"""Contiguous blocks of experts."""

import pytest
import torch

from moe.placement import ExpertPlacement
from moe.stages import LogicalIds


@pytest.mark.parametrize(
    ("ep_rank", "expected"), [(0, (0, 1, 2, 3)), (1, (4, 5, 6, 7)), (2, (8, 9, 10, 11))]
)
def test_a_rank_holds_a_block_of_experts(ep_rank, expected):
    assert ExpertPlacement(num_experts=12, ep_size=3).local_experts(ep_rank) == expected


def test_an_expert_is_computed_where_it_is_held():
    assert ExpertPlacement(num_experts=6, ep_size=3).ep_rank_of_expert() == (0, 0, 1, 1, 2, 2)


def test_ids_of_slots_are_ids_of_experts_and_minus_one_stays():
    ids = LogicalIds(torch.tensor([[3, -1, 0]], dtype=torch.int32))
    placement = ExpertPlacement(num_experts=4, ep_size=2)
    assert placement.to_physical(ids).tolist() == [[3, -1, 0]]


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 experts do not divide among 4 ranks"):
        ExpertPlacement(num_experts=10, ep_size=4)

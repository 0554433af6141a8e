"""The two views of the same ranks."""

import pytest

from topology.layout import ParallelLayout


def test_unequal_products_are_refused_with_both_written_out():
    with pytest.raises(ValueError, match=r"\S") as error:
        ParallelLayout(attn_dp=2, cp=1, attn_tp=4, ep=3, moe_tp=2)
    assert str(error.value) == ("attention dp(2) * cp(1) * tp(4) = 8, but moe ep(3) * tp(2) = 6")


def test_a_degree_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"degrees must be at least 1, got \(0, 1, 1\)"):
        ParallelLayout(attn_dp=0, ep=1)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, (0, 2, 4, 6)), (3, (1, 3, 5, 7)), (6, (0, 2, 4, 6))],
)
def test_an_ep_group_holds_the_ranks_of_equal_moe_tp(rank, expected):
    assert ParallelLayout(attn_dp=8, ep=4, moe_tp=2).ep_group(rank) == expected


def test_attention_counts_dp_slowest_and_tp_fastest():
    layout = ParallelLayout(attn_dp=2, cp=2, attn_tp=2, ep=8)
    places = [tuple(layout.attention.coord(5, axis) for axis in ("dp", "cp", "tp"))]
    assert places == [(1, 0, 1)]


def test_the_world_is_every_rank_in_order():
    assert ParallelLayout(attn_dp=1, attn_tp=4, ep=2, moe_tp=2).world == (0, 1, 2, 3)


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 1)), (3, (2, 3)), (6, (6, 7))])
def test_an_attention_tp_group_holds_the_ranks_with_equal_tokens(rank, expected):
    layout = ParallelLayout(attn_dp=2, cp=2, attn_tp=2, ep=8)
    assert layout.attention_tp_group(rank) == expected


def test_the_groups_of_a_forward_are_those_of_experts_and_of_equal_tokens():
    layout = ParallelLayout(attn_dp=2, attn_tp=2, ep=2, moe_tp=2)
    assert set(layout.groups()) == {(0, 1, 2, 3), (0, 2), (1, 3), (0, 1), (2, 3)}


def test_a_group_that_serves_two_ends_is_named_once():
    assert ParallelLayout(attn_dp=1, attn_tp=2, ep=2).groups() == ((0, 1),)

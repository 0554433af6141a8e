"""Laws of the index arithmetic over drawn counts and routings, against plain Python."""

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.dispatched import DeepEpV2ExpandedDispatchOutput
from moe.indices import (
    arrival_numbers,
    compact_row_bound,
    local_ids,
    m_indices_from_counts,
    pad_expert_counts,
    scatter_index,
    slab_rows,
    wide_row_bound,
)
from moe.permute.deepep_v2 import (
    SlabOverflowError,
    ep_expand_init_m_indices_from_psum,
    expand_to_masked_slab,
    masked_slab_to_expand,
)

BLOCK = 128
AROUND_BLOCKS = (0, 1, 127, 128, 129, 255, 256, 257)
COUNTS = st.lists(st.sampled_from(AROUND_BLOCKS) | st.integers(0, 9), min_size=1, max_size=6)


def some_counts(test):
    """On drawn counts of experts and with one that is empty first, in the middle and last."""
    for counts in ([0, 5, 3], [5, 0, 3], [5, 3, 0], [0, 0], [257], [127, 128, 129]):
        test = example(counts=counts)(test)
    return settings(max_examples=30)(given(counts=COUNTS)(test))


def in_blocks(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


@pytest.mark.parametrize("bound", [compact_row_bound, wide_row_bound])
@some_counts
def test_segments_of_any_counts_fill_the_bound_exactly(bound, counts):
    num_rows = bound(sum(counts), len(counts), BLOCK)
    padded = pad_expert_counts(torch.tensor(counts), BLOCK, num_rows).tolist()
    assert sum(padded) == num_rows
    assert padded[:-1] == [in_blocks(count) for count in counts[:-1]]
    assert padded[-1] >= in_blocks(counts[-1])


@given(counts=COUNTS, elsewhere=st.integers(0, 400))
@settings(max_examples=30)
def test_the_bound_also_holds_routes_that_other_ranks_compute(counts, elsewhere):
    num_rows = compact_row_bound(sum(counts) + elsewhere, len(counts), BLOCK)
    assert num_rows >= sum(map(in_blocks, counts))


@pytest.mark.parametrize(
    ("num_routes", "num_experts", "num_rows"),
    [
        (14, 2, 256),
        (10, 512, 1280),
        (20, 512, 2560),
        (320, 512, 40960),
        (640, 512, 65664),
        (1280, 512, 66304),
        (0, 8, 0),
        (1, 8, 128),
    ],
)
def test_one_route_an_expert_and_the_rest_to_the_first_need_all_of_the_bound(
    num_routes, num_experts, num_rows
):
    counts = [int(expert < num_routes) for expert in range(num_experts)]
    counts[0] += num_routes - sum(counts)
    assert sum(map(in_blocks, counts)) == num_rows
    assert compact_row_bound(num_routes, num_experts, BLOCK) == num_rows


@some_counts
def test_every_row_of_a_segment_has_its_expert(counts):
    expected = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert m_indices_from_counts(torch.tensor(counts)).tolist() == expected


@some_counts
def test_the_real_rows_of_a_slab_are_its_first(counts):
    height = max(counts) + 3
    expected = [slab * height + row for slab, count in enumerate(counts) for row in range(count)]
    assert slab_rows(torch.tensor(counts), height).tolist() == expected


@given(experts=st.lists(st.integers(0, 5), max_size=40), seed=st.integers(0, 2**31))
def test_the_arrivals_at_an_expert_are_numbered_from_zero_each_once(experts, seed):
    arrival = arrival_numbers(torch.tensor(experts, dtype=torch.int64), seed).tolist()
    for expert in set(experts):
        numbers = [n for n, other in zip(arrival, experts, strict=True) if other == expert]
        assert sorted(numbers) == list(range(len(numbers)))


@given(
    ids=st.lists(st.integers(-1, 11), max_size=20),
    num_local=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_a_slot_is_local_on_one_rank_and_a_dropped_route_on_none(ids, num_local):
    given_ids = torch.tensor(ids, dtype=torch.int32)
    local = [local_ids(given_ids, first, num_local) for first in range(0, 12, num_local)]
    for place, expert in enumerate(ids):
        found = [
            rank * num_local + int(of_rank[place])
            for rank, of_rank in enumerate(local)
            if of_rank[place] >= 0
        ]
        assert found == [expert] * (expert >= 0)


@given(
    ids=st.lists(st.lists(st.integers(-2, 4), min_size=2, max_size=2), max_size=12),
    seed=st.integers(0, 2**31),
)
def test_a_route_is_scattered_into_its_experts_segment_and_no_two_to_one_row(ids, seed):
    topk_ids = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    flat = topk_ids.flatten().tolist()
    lengths = [flat.count(expert) + 3 for expert in range(4)]
    starts = [0, *accumulate(lengths)]
    rows = scatter_index(topk_ids, torch.tensor(lengths), seed).flatten().tolist()
    for row, expert in zip(rows, flat, strict=True):
        if 0 <= expert < 4:
            assert starts[expert] <= row < starts[expert] + lengths[expert] - 3
        else:
            assert row == -1
    taken = [row for row in rows if row >= 0]
    assert len(set(taken)) == len(taken)


def psum_of(counts: list[int]) -> list[int]:
    """Aligned start of each segment + its real rows."""
    starts = [0, *accumulate(map(in_blocks, counts))]
    return [start + count for start, count in zip(starts, counts, strict=False)]


@some_counts
def test_a_whole_block_has_its_expert_and_rows_behind_the_last_have_none(counts):
    expected = [expert for expert, count in enumerate(counts) for _ in range(in_blocks(count))]
    expected += [-1] * BLOCK
    psum = torch.tensor(psum_of(counts), dtype=torch.int32)
    found = ep_expand_init_m_indices_from_psum(psum, len(expected), BLOCK)
    assert (found.tolist(), found.dtype) == (expected, torch.int32)


def expanded(counts: list[int], height: int) -> DeepEpV2ExpandedDispatchOutput:
    """Rows that hold their own number in base 256, behind segments a block that none fills."""
    num_rows = sum(map(in_blocks, counts)) + BLOCK
    number = torch.arange(num_rows)
    return DeepEpV2ExpandedDispatchOutput(
        physical_ids=torch.empty(0, 1, dtype=torch.int32),
        wire=torch.empty(0, 2),
        wire_scale=None,
        hidden_states=torch.stack([number // 256, number % 256], dim=1).to(torch.bfloat16),
        hidden_states_scale=None,
        topk_weights=torch.ones(num_rows),
        psum=torch.tensor(psum_of(counts), dtype=torch.int32),
        masked_max_m=height,
        expected_m=1,
        handle=None,
    )


def is_real(counts: list[int], num_rows: int) -> Tensor:
    """[num_rows] bool: expanded rows of a route."""
    real = torch.zeros(num_rows, dtype=torch.bool)
    for end, count in zip(psum_of(counts), counts, strict=True):
        real[end - count : end] = True
    return real


@some_counts
def test_slabs_are_as_full_as_segments_and_give_their_rows_back_bitwise(counts):
    sent = expanded(counts, height=max(counts) + 1)
    slabs = expand_to_masked_slab(sent, BLOCK)
    assert slabs.masked_m.tolist() == counts
    back = masked_slab_to_expand(slabs.hidden_states, sent.psum, sent.topk_weights, BLOCK)
    real = is_real(counts, len(back))
    assert torch.equal(back[real], sent.hidden_states[real])
    assert bool(back[~real].isnan().all())


@some_counts
def test_a_slab_takes_as_many_rows_as_it_is_high(counts):
    slabs = expand_to_masked_slab(expanded(counts, height=max(counts)), BLOCK)
    assert slabs.hidden_states.shape[1] == max(counts)


@given(counts=COUNTS.filter(any))
def test_a_row_more_than_a_slab_takes_is_an_error_that_names_the_expert(counts):
    fullest = max(counts)
    message = f"local expert {counts.index(fullest)} has {fullest} rows, its slab {fullest - 1}:"
    with pytest.raises(SlabOverflowError, match=message):
        expand_to_masked_slab(expanded(counts, height=fullest - 1), BLOCK)

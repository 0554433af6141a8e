"""Faults of kept memory: what was left there stands again, and only where something was."""

from dataclasses import replace

import pytest
import torch

from moe.faults.buffers import (
    combine_slot_stale,
    pad_slot_ids_kept,
    receive_buffers_overlap,
    stale_counts,
    stale_row,
)
from moe.formats import Stage
from moe.stages import CombineOutput
from tests.unit.faults.values import context, kept, received, slabs, written


def before(value, stage=Stage.DISPATCH, **params):
    return context(earlier={stage: value}, **params)


def test_ids_past_a_count_are_those_of_the_forward_before():
    full = written((2, 2), ((7, 7), (1, 3), (7, 7), (7, 7)))
    kept_ids = pad_slot_ids_kept(written((1, 2)), before(full)).topk_ids
    assert kept_ids.tolist() == [[5, 2], [1, 3], [3, 4], [2, 6]]


@pytest.mark.parametrize(("row", "slab", "at"), [(0, 0, 0), (1, 1, 0), (2, 0, 0)])
def test_a_row_that_was_filled_before_is_as_it_was(row, slab, at):
    """The first slab had one row less, so only two places held a row before."""
    now, left = slabs((2, 1)), slabs((1, 1), first=100.0)
    stale = stale_row(now, before(left, row=row))
    assert torch.equal(stale.hidden_states[slab, at], left.hidden_states[slab, at])
    assert torch.equal(stale.hidden_states_scale[slab, at], left.hidden_states_scale[slab, at])
    assert int((stale.hidden_states != now.hidden_states).any(-1).sum()) == 1


def test_a_place_that_was_empty_before_holds_no_stale_row():
    now = slabs((1, 0))
    assert stale_row(now, before(slabs((0, 1)), row=0)) is now


def test_counts_are_those_of_the_forward_before():
    stale = stale_counts(slabs((2, 1)), before(slabs((0, 3))))
    assert stale.masked_m.tolist() == [0, 3]
    assert stale.handle.count.tolist() == [[2, 0], [1, 0]]


@pytest.mark.parametrize("fault", [pad_slot_ids_kept, stale_row, stale_counts])
@pytest.mark.parametrize("sent", [slabs(), written(), received()], ids=lambda v: type(v).__name__)
def test_nothing_is_left_over_in_the_first_forward(fault, sent):
    assert fault(sent, context(row=0)) is sent


@pytest.mark.parametrize("fault", [pad_slot_ids_kept, stale_row, stale_counts])
def test_nothing_is_left_over_where_no_memory_stays(fault):
    sent = received()
    assert fault(sent, before(received(), row=0)) is sent


@pytest.mark.parametrize(
    ("row", "columns", "rows"),
    [
        (0, 1, [[0, 2], [2, 3], [4, 5]]),
        (1, 1, [[0, 1], [2, 4], [4, 5]]),
        (2, 1, [[0, 2], [2, 3], [4, 5]]),
        (0, 9, [[2, 3], [2, 3], [4, 5]]),
        (0, 0, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_the_last_columns_of_a_row_are_the_first_of_the_row_behind(row, columns, rows):
    wrong = receive_buffers_overlap(received(), context(row=row, columns=columns))
    assert wrong.hidden_states.tolist() == rows


def test_codes_of_a_row_are_overwritten_in_slabs():
    sent = slabs((1, 2))
    sent = replace(sent, hidden_states=sent.hidden_states.to(torch.float8_e4m3fn))
    wrong = receive_buffers_overlap(sent, context(row=0, columns=1)).hidden_states
    assert wrong[1].to(torch.float32).tolist() == [[8, 10], [10, 11], [12, 13], [14, 15]]


@pytest.mark.parametrize(
    "sent", [received(rows=1), slabs((1, 1)), kept([[0], [1]], [[0], [1]])], ids=str
)
def test_a_row_without_a_received_one_behind_it_cannot_be_overwritten(sent):
    assert receive_buffers_overlap(sent, context(row=0, columns=1)) is sent


def combined(first):
    return CombineOutput(routed=first + torch.arange(2.0)[:, None])


def test_one_result_is_that_of_the_forward_before():
    there = context(seen={Stage.DISPATCH: slabs()}, earlier={Stage.COMBINE: combined(10)}, row=3)
    assert combine_slot_stale(combined(0), there).routed.flatten().tolist() == [0, 11]


@pytest.mark.parametrize("sent", [slabs(), received()], ids=["first forward", "no memory"])
def test_no_result_is_left_over(sent):
    earlier = {Stage.COMBINE: combined(10)} if isinstance(sent, type(received())) else {}
    now = combined(0)
    there = context(seen={Stage.DISPATCH: sent}, earlier=earlier, row=0)
    assert combine_slot_stale(now, there) is now

"""Faults of the way back: which routes are added, with which weights, and where results lie."""

from dataclasses import replace

import pytest
import torch

from moe.faults.routes_back import (
    combine_offset_shifted,
    combine_rows_raced,
    combine_weights_missing,
    combine_weights_of_slot0,
    combine_weights_twice,
    hidden_tail_dropped,
    idle_dummy_row_kept,
    k_from_row0,
)
from moe.formats import Stage
from moe.stages import CombineInput, CombineOutput, Gemm2Output
from tests.unit.faults.values import context, kept, permuted, received, received_v2, slabs


def folded(topk_ids, sent=None):
    """Two rows with up to two routes each; grouped row i has the output 2**i."""
    output = permuted()
    ids = torch.tensor(topk_ids)
    index = torch.where(ids >= 0, torch.arange(4).view(2, 2), -1)
    restore = replace(
        output.restore, topk_ids=ids, output_index=index, topk_weights=torch.ones(2, 2)
    )
    return {
        Stage.DISPATCH: sent or received(),
        Stage.PRE_PERMUTE: replace(output, restore=restore),
        Stage.GEMM2: Gemm2Output(output=torch.tensor([[1.0], [2.0], [4.0], [8.0]])),
    }


def test_rows_with_more_routes_than_the_first_lose_the_rest():
    partials = CombineInput(partial=torch.tensor([[1.0], [12.0]]))
    wrong = k_from_row0(partials, context(folded([[0, -1], [0, 1]])))
    assert wrong.partial.flatten().tolist() == [1.0, 4.0]


@pytest.mark.parametrize(
    "seen",
    [folded([[0, 1], [0, -1]]), folded([[0, -1], [0, 1]], kept([[0]], [[0]]))],
    ids=["first row has most", "factor in the sum"],
)
def test_rows_with_no_more_routes_than_the_first_stay(seen):
    partials = CombineInput(partial=torch.zeros(2, 1))
    assert k_from_row0(partials, context(seen)) is partials


@pytest.mark.parametrize(
    ("fault", "weights"),
    [
        (combine_weights_twice, [[0.25, 0.0625], [0.5625, 0.0]]),
        (combine_weights_of_slot0, [[0.5, 0.5], [0.75, 0.75]]),
        (combine_weights_missing, [[1, 1], [1, 0]]),
    ],
    ids=["twice", "slot 0", "never"],
)
def test_combine_is_handed_other_weights(fault, weights):
    pending = torch.tensor([[0.5, 0.25], [0.75, 0.0]])
    partials = CombineInput(partial=torch.zeros(1, 1), pending_weights=pending)
    assert fault(partials, context()).pending_weights.tolist() == weights
    assert fault(partials, context()).partial is partials.partial


@pytest.mark.parametrize(
    "fault", [combine_weights_twice, combine_weights_of_slot0, combine_weights_missing]
)
def test_weights_that_are_folded_in_are_not_handed_to_combine(fault):
    partials = CombineInput(partial=torch.zeros(1, 1))
    assert fault(partials, context()) is partials


def combined(columns=1):
    return CombineOutput(routed=torch.arange(1.0, 1.0 + 3 * columns).view(3, columns))


def test_results_are_one_row_off():
    wrong = combine_offset_shifted(combined(), context({Stage.DISPATCH: slabs()}))
    assert wrong.routed.flatten().tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("p", "got"),
    [(1.0, [[3, 2], [5, 4], [1, 6]]), (0.0, [[1, 2], [3, 4], [5, 6]])],
    ids=["every row", "none"],
)
def test_halves_of_rows_are_the_next_rows(p, got):
    wrong = combine_rows_raced(combined(columns=2), context({Stage.DISPATCH: received()}, p=p))
    assert wrong.routed.tolist() == got


@pytest.mark.parametrize(("vector", "left"), [(2, 4), (4, 4), (3, 3), (5, 5), (8, 0)])
def test_columns_past_the_last_whole_vector_are_zero(vector, left):
    there = context({Stage.DISPATCH: received()}, vector=vector)
    wrong = hidden_tail_dropped(combined(columns=5), there).routed
    assert (wrong != 0).sum(1).tolist() == [left] * 3


@pytest.mark.parametrize("fault", [combine_offset_shifted, hidden_tail_dropped])
def test_what_never_left_is_not_combined(fault):
    there, rows = context({Stage.DISPATCH: kept([[0]], [[0]])}, vector=2), combined()
    assert fault(rows, there) is rows


def test_an_idle_rank_keeps_the_row_of_its_dummy():
    idle = CombineOutput(routed=torch.zeros(0, 5))
    there = context({Stage.DISPATCH: received_v2(num_tokens=0)})
    assert idle_dummy_row_kept(idle, there).routed.tolist() == [[0.0] * 5]


@pytest.mark.parametrize("sent", [received_v2(num_tokens=2), received()], ids=["busy", "no dummy"])
def test_a_rank_that_sent_no_dummy_keeps_none(sent):
    rows = combined()
    assert idle_dummy_row_kept(rows, context({Stage.DISPATCH: sent})) is rows

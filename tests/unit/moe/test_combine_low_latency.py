"""Combine of the low-latency mode, and what its buffers keep from forward to forward."""

import pytest
import torch

from moe.stages import CombineInput
from tests.unit.moe.low_latency_worlds import (
    CAPACITY,
    LOCAL_EXPERTS,
    MANY,
    ROUTES,
    Routes,
    combined,
    dispatch,
    dispatcher,
    new_buffers,
    sent,
)
from topology.loopback import LoopbackWorld, RankError


def test_every_routes_row_comes_home():
    outputs = combined(ROUTES, lambda expert, source, row: 2.0**expert)
    # Token (0, 0): experts 0, 1, 4; (0, 1): 2, 3, 5; (0, 2): 0; (0, 3): none.
    assert outputs[0].routed[:, 0].tolist() == [19.0, 44.0, 1.0, 0.0]
    assert outputs[2].routed[:, 0].tolist() == [48.0, 37.0]
    assert outputs[3].routed[:, 0].tolist() == [7.0]


def test_a_row_comes_home_to_the_token_that_sent_it():
    outputs = combined(ROUTES, lambda expert, source, row: 16.0 * source + row)
    assert outputs[2].routed[:, 0].tolist() == [2 * 32.0, 3 * 33.0]


def test_a_rank_without_tokens_gets_no_rows():
    routed = combined(ROUTES, lambda *_: 1.0)[1].routed
    assert (routed.shape, routed.dtype) == ((0, 4), torch.bfloat16)


EVERYWHERE: Routes = [[[5, 2, 0]], [], [], []]


def test_each_slots_weight_meets_its_own_row():
    weights = [torch.tensor([[1.0, 10.0, 100.0]]), *[torch.ones(0, 3)] * 3]
    got = combined(EVERYWHERE, lambda expert, *_: float(expert), weights=weights)
    assert got[0].routed.tolist() == [[25.0] * 4]


def test_terms_are_added_in_ascending_slot_order():
    # 2^24 + 1 is 2^24 in fp32, so ascending slots lose the one; any other order keeps it.
    terms = {5: 2.0**24, 2: 1.0, 0: -(2.0**24)}
    got = combined(EVERYWHERE, lambda expert, *_: terms[expert])
    assert got[0].routed.tolist() == [[0.0] * 4]


def test_the_sum_is_rounded_to_bf16_once():
    # Each 2^-8 alone is a tie that rounds back to 1; together they are one step of bf16.
    terms = {5: 1.0, 2: 2.0**-8, 0: 2.0**-8}
    got = combined(EVERYWHERE, lambda expert, *_: terms[expert])
    assert got[0].routed.tolist() == [[1.0078125] * 4]


def test_weights_that_somebody_folded_are_refused():
    def program(verbs):
        held = new_buffers()
        output = dispatch(verbs, ROUTES, held)
        folded = CombineInput(partial=output.hidden_states)
        return dispatcher(verbs, held).combine(folded, output.handle)

    with pytest.raises(RankError, match="this combine applies the weights"):
        LoopbackWorld(4).run(program)


def test_the_order_of_arrival_changes_no_result():
    def output_of(expert: int, source: int, row: int) -> float:
        return 1 + expert / 3 + source / 7 + row / 11

    first, second = (combined(MANY, output_of, seed=seed) for seed in (1, 2))
    assert all(torch.equal(a.routed, b.routed) for a, b in zip(first, second, strict=True))


FEWER: Routes = [[[0, 2, -1]], [], [[0, -1, -1]], []]


def test_a_forward_reads_nothing_of_the_one_before():
    held = new_buffers()
    combined(MANY, lambda *_: 7.0, held=held)
    after = combined(FEWER, lambda expert, *_: 1.0 + expert, held=held)
    assert [one.routed[:, 0].tolist() for one in after] == [[4.0], [], [1.0], []]


def test_a_later_forward_changes_nothing_that_an_earlier_one_handed_over():
    held = new_buffers()
    first = sent(MANY, held=held)
    before = [[t.clone() for t in (o.hidden_states, o.handle.source_row)] for o in first]
    sent(FEWER, held=held), sent(FEWER, held=held)  # both buffers
    for output, (hidden, source_row) in zip(first, before, strict=True):
        assert torch.equal(output.hidden_states.nan_to_num(), hidden.nan_to_num())
        assert torch.equal(output.handle.source_row, source_row)


def test_messages_of_the_forward_before_stay_behind_the_counts_of_this_one():
    held = new_buffers()
    for routes in (MANY, FEWER):
        combined(routes, lambda *_: 1.0, held=held)
    inbox = held[0].take_chunks((LOCAL_EXPERTS, 4), CAPACITY, 4 * 2 + 8)
    assert inbox.counts.tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]
    chunk_of_rank_1 = inbox.rows[CAPACITY : 2 * CAPACITY, :2].clone().view(torch.bfloat16)
    assert sorted(chunk_of_rank_1[:, 0].tolist()) == [16.0, 17.0, 18.0, 19.0]

"""Collective faults: one call of one rank is answered in another way, the rest passes."""

import pytest
import torch

from moe.faults import arm, wrap_collectives
from topology.collectives import DeadlockError
from topology.loopback import LoopbackWorld

TOKENS = (2, 2)
ONES = (1, 1)
CALLS = ["dispatch counts", "dispatch rows", "combine rows"]


def exchange(faults):
    """Three all-to-alls of one row to each rank, as one forward makes them: [rank][call]."""

    def program(collectives):
        verbs = wrap_collectives(collectives, faults, set())
        sent = torch.tensor([[10.0 + verbs.rank], [20.0 + verbs.rank]])
        return [verbs.all_to_all_v(sent, ONES, ONES, (0, 1)).flatten().tolist() for _ in CALLS]

    return LoopbackWorld(2).run(program)


CLEAN = [[10.0, 11.0], [20.0, 21.0]]


def test_without_a_fault_every_call_passes():
    assert exchange([]) == [[CLEAN[0]] * 3, [CLEAN[1]] * 3]


@pytest.mark.parametrize(
    ("row", "received"), [(0, [0.0, 21.0]), (1, [20.0, 0.0]), (2, [0.0, 21.0])]
)
def test_a_dropped_partial_is_one_row_of_the_combine_on_one_rank(row, received):
    results = exchange([arm("partial_dropped", {"row": row, "rank": 1}, TOKENS)])
    assert results == [[CLEAN[0]] * 3, [CLEAN[1], CLEAN[1], received]]


def test_a_dropped_partial_of_a_rank_that_gets_none_changes_nothing():
    def program(collectives):
        verbs = wrap_collectives(collectives, [arm("partial_dropped", {"rank": 0}, TOKENS)], set())
        nothing = torch.zeros(0, 1)
        return [verbs.all_to_all_v(nothing, (0, 0), (0, 0), (0, 1)).shape[0] for _ in CALLS]

    assert LoopbackWorld(2).run(program) == [[0, 0, 0], [0, 0, 0]]


def test_a_skipped_combine_leaves_the_others_waiting():
    with pytest.raises(DeadlockError) as caught:
        exchange([arm("combine_skipped", {"rank": 1}, TOKENS)])
    (waiting,) = caught.value.waiting
    assert (waiting.present, waiting.missing) == ((0,), (1,))


def test_a_wrapped_rank_is_still_itself():
    def program(collectives):
        verbs = wrap_collectives(
            collectives, [arm("partial_dropped", {"rank": "all"}, TOKENS)], set()
        )
        everybody = verbs.all_gather_v(torch.tensor([verbs.rank]), ONES, (0, 1)).tolist()
        return verbs.rank, verbs.world_size, everybody

    assert LoopbackWorld(2).run(program) == [(0, 2, [0, 1]), (1, 2, [0, 1])]


def test_ranks_without_the_fault_keep_their_own_verbs():
    def program(collectives):
        faults = [arm("partial_dropped", {"rank": 1}, TOKENS)]
        return wrap_collectives(collectives, faults, set()) is collectives

    assert LoopbackWorld(2).run(program) == [True, False]

"""Ranks of a loopback world that raise, leave or wait for each other."""

import threading

import pytest
import torch

from topology.collectives import DeadlockError, WorldAbortedError
from topology.loopback import LoopbackWorld, RankError


def rank_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank-")]


def gather_ranks(collectives, group):
    mine = torch.tensor([collectives.rank])
    return collectives.all_gather_v(mine, [1] * len(group), group).tolist()


def failure(world: LoopbackWorld, program) -> RankError:
    with pytest.raises(RankError) as error:
        world.run(program)
    return error.value


def raises_on_rank_1(verbs):
    gather_ranks(verbs, (0, 1, 2, 3))
    if verbs.rank == 1:
        raise ZeroDivisionError("seven by nothing")
    return gather_ranks(verbs, (0, 1, 2, 3))


def test_a_raising_rank_is_named_with_what_it_raised():
    assert str(failure(LoopbackWorld(4), raises_on_rank_1)) == (
        "rank 1 raised ZeroDivisionError: seven by nothing"
    )


def test_what_a_rank_raised_is_the_cause_that_a_traceback_shows():
    assert isinstance(failure(LoopbackWorld(4), raises_on_rank_1).__cause__, ZeroDivisionError)


def test_a_raising_rank_leaves_no_thread_behind():
    failure(LoopbackWorld(4), raises_on_rank_1)
    assert rank_threads() == []


def test_the_peers_of_a_raising_rank_are_released():
    released = []

    def program(verbs):
        try:
            return raises_on_rank_1(verbs)
        except WorldAbortedError:
            released.append(verbs.rank)
            raise

    failure(LoopbackWorld(4), program)
    assert sorted(released) == [0, 2, 3]


def test_a_rank_that_exits_the_interpreter_does_not_hang_the_world():
    def program(verbs):
        if verbs.rank == 1:
            raise SystemExit(3)
        return gather_ranks(verbs, (0, 1))

    assert isinstance(failure(LoopbackWorld(2), program).cause, SystemExit)


def test_a_released_rank_that_calls_again_is_released_again():
    def program(verbs):
        if verbs.rank == 2:
            raise ZeroDivisionError
        try:
            return gather_ranks(verbs, (0, 1, 2))
        finally:
            gather_ranks(verbs, (0, 1))

    assert failure(LoopbackWorld(3), program).rank == 2


def deadlock(world_size: int, program) -> DeadlockError:
    with pytest.raises(DeadlockError) as error:
        LoopbackWorld(world_size).run(program)
    return error.value


def leaves_early(verbs):
    gather_ranks(verbs, (0, 1, 2))
    return gather_ranks(verbs, (0, 1, 2)) if verbs.rank != 1 else None


def waits_in_a_ring(verbs):
    return gather_ranks(verbs, [(0, 1), (1, 2), (0, 2)][verbs.rank])


def disagrees_about_the_order(verbs):
    return gather_ranks(verbs, (0, 1) if verbs.rank == 0 else (1, 0))


@pytest.mark.parametrize(
    ("world_size", "program", "expected"),
    [
        (3, leaves_early, "ranks 0, 2 wait in all_gather_v #1 for rank 1"),
        (
            3,
            waits_in_a_ring,
            "rank 0 waits in all_gather_v #0 for rank 1; "
            "rank 1 waits in all_gather_v #0 for rank 2; "
            "rank 2 waits in all_gather_v #0 for rank 0",
        ),
        (
            2,
            disagrees_about_the_order,
            "rank 0 waits in all_gather_v #0 for rank 1; "
            "rank 1 waits in all_gather_v #0 for rank 0",
        ),
    ],
    ids=["leaves-early", "ring", "group-order"],
)
def test_a_deadlock_says_who_waits_for_whom(world_size, program, expected):
    assert str(deadlock(world_size, program)) == expected


def test_a_deadlock_leaves_no_thread_behind():
    deadlock(3, leaves_early)
    assert rank_threads() == []


@pytest.mark.parametrize("program", [raises_on_rank_1, leaves_early], ids=["raise", "deadlock"])
def test_a_world_works_again_after_a_failure(program):
    world = LoopbackWorld(4)
    with pytest.raises((RankError, DeadlockError)):
        world.run(program)
    assert world.run(lambda verbs: gather_ranks(verbs, (0, 1, 2, 3))) == [[0, 1, 2, 3]] * 4

"""Sums over the ranks of a loopback world: arithmetic, ownership, disagreement."""

import pytest
import torch

from topology.collectives import CollectiveMismatchError, DeadlockError
from topology.loopback import LoopbackWorld, RankError

WORLD = (0, 1, 2)


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def test_all_reduce_gives_every_member_the_sum():
    rows = [[[1, 2]], [[10, 20]], [[100, 200]]]
    results = LoopbackWorld(3).run(
        lambda verbs: verbs.all_reduce(torch.tensor(rows[verbs.rank]), WORLD).tolist()
    )
    assert results == [[[111, 222]]] * 3


def test_reduce_scatter_gives_each_member_its_chunk_of_the_sum():
    def program(verbs):
        mine = torch.tensor([1, 2, 3]) * 10**verbs.rank
        return verbs.reduce_scatter_v(mine, [2, 0, 1], WORLD).tolist()

    assert LoopbackWorld(3).run(program) == [[111, 222], [], [333]]


def test_chunks_follow_the_order_of_the_group():
    def program(verbs):
        return verbs.reduce_scatter_v(torch.tensor([1, 2, 3]), [1, 2], (1, 0)).tolist()

    assert LoopbackWorld(2).run(program) == [[4, 6], [2]]


def test_the_sum_is_added_in_the_order_of_the_group():
    # Before its partner has come, 1 is lost beside 2 ** 25, in fp32 as well.
    values = [2.0**25, 1.0, -(2.0**25)]

    def program(verbs, group):
        return verbs.all_reduce(torch.tensor([values[verbs.rank]]), group).tolist()

    ascending = LoopbackWorld(3).run(lambda verbs: program(verbs, (0, 1, 2)))
    partners_first = LoopbackWorld(3).run(lambda verbs: program(verbs, (2, 0, 1)))
    assert (ascending, partners_first) == ([[0.0]] * 3, [[1.0]] * 3)


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter_v"])
def test_a_sum_is_rounded_once(verb):
    # bf16 has no value between 256 and 258: rounded after each addition, both ones are lost.
    values = [256.0, 1.0, 1.0]

    def program(verbs):
        mine = bf16(values[verbs.rank])
        counts = () if verb == "all_reduce" else ([1, 0, 0],)
        return getattr(verbs, verb)(mine, *counts, WORLD)

    assert LoopbackWorld(3).run(program)[0].tolist() == [258.0]


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter_v"])
def test_a_sum_has_the_dtype_of_its_rows(verb):
    counts = () if verb == "all_reduce" else ([1, 0],)
    results = LoopbackWorld(2).run(
        lambda verbs: getattr(verbs, verb)(bf16(1.0), *counts, (0, 1)).dtype
    )
    assert results == [torch.bfloat16] * 2


def test_integers_beyond_fp32_are_added_exactly():
    results = LoopbackWorld(2).run(
        lambda verbs: verbs.all_reduce(torch.tensor([2**40 + verbs.rank]), (0, 1)).tolist()
    )
    assert results == [[2**41 + 1]] * 2


def test_a_group_of_one_gets_its_own_rows_back():
    results = LoopbackWorld(2).run(
        lambda verbs: verbs.all_reduce(bf16(verbs.rank), (verbs.rank,)).tolist()
    )
    assert results == [[0.0], [1.0]]


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter_v"])
def test_no_rows_are_reduced_by_everybody(verb):
    counts = () if verb == "all_reduce" else ([0, 0],)
    rows = torch.zeros(0, 4, dtype=torch.bfloat16)
    results = LoopbackWorld(2).run(lambda verbs: getattr(verbs, verb)(rows, *counts, (0, 1)).shape)
    assert results == [(0, 4)] * 2


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter_v"])
def test_a_summand_may_be_overwritten_after_the_call(verb):
    counts = () if verb == "all_reduce" else ([1, 1, 1],)

    def program(verbs):
        mine = torch.full((3,), verbs.rank + 1)
        total = getattr(verbs, verb)(mine, *counts, WORLD)
        mine.fill_(-1)
        return set(total.tolist())

    assert LoopbackWorld(3).run(program) == [{6}] * 3


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter_v"])
def test_a_sum_belongs_to_who_received_it(verb):
    counts = () if verb == "all_reduce" else ([1, 1, 1],)

    def program(verbs):
        total = getattr(verbs, verb)(torch.ones(3), *counts, WORLD)
        seen = set(total.tolist())
        total.fill_(-1)
        return seen

    assert LoopbackWorld(3).run(program) == [{3.0}] * 3


def test_the_rows_of_a_member_are_not_written_to():
    def program(verbs):
        mine = torch.ones(2)
        verbs.all_reduce(mine, (0, 1))
        verbs.reduce_scatter_v(mine, [1, 1], (0, 1))
        return mine.tolist()

    assert LoopbackWorld(2).run(program) == [[1.0, 1.0]] * 2


def other_length(verbs):
    return verbs.all_reduce(torch.zeros(1 + verbs.rank), (0, 1))


def other_width(verbs):
    return verbs.all_reduce(torch.zeros(1, 3 + verbs.rank), (0, 1))


def other_counts(verbs):
    return verbs.reduce_scatter_v(torch.zeros(3), [1, 2] if verbs.rank else [2, 1], (0, 1))


def miscounted(verbs):
    return verbs.reduce_scatter_v(torch.zeros(2 + verbs.rank), [1, 1], (0, 1))


def other_verb(verbs):
    if verbs.rank:
        return verbs.reduce_scatter_v(torch.zeros(2), [1, 1], (0, 1))
    return verbs.all_reduce(torch.zeros(2), (0, 1))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (other_length, r"all_reduce #0 .*: rank 1 adds \[2\] rows, rank 0 \[1\]"),
        (other_width, r"rank 1 sends .* rows of \(4,\), rank 0 .* rows of \(3,\)"),
        (other_counts, r"reduce_scatter_v #0 .*: rank 1 adds \[1, 2\] rows, rank 0 \[2, 1\]"),
        (miscounted, "reduce_scatter_v: 3 rows where 2 were announced"),
        (other_verb, r"rank 1 calls reduce_scatter_v where ranks \[0\] call all_reduce #0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_members_that_do_not_agree_are_told_apart(program, message):
    with pytest.raises(RankError) as error:
        LoopbackWorld(2).run(program)
    with pytest.raises(CollectiveMismatchError, match=message):
        raise error.value.cause


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter_v"])
def test_a_rank_outside_the_group_is_refused_by_name(verb):
    counts = () if verb == "all_reduce" else ([1, 0],)

    def program(verbs):
        return getattr(verbs, verb)(torch.zeros(1), *counts, (1, 2)) if verbs.rank == 0 else None

    with pytest.raises(RankError) as error:
        LoopbackWorld(3).run(program)
    assert str(error.value.cause) == f"rank 0 calls {verb} on group [1, 2] without it"


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter_v"])
def test_a_deadlock_in_a_reduction_names_it(verb):
    counts = () if verb == "all_reduce" else ([1, 0, 0],)

    def program(verbs):
        return getattr(verbs, verb)(torch.zeros(1), *counts, WORLD) if verbs.rank != 1 else None

    with pytest.raises(DeadlockError) as error:
        LoopbackWorld(3).run(program)
    assert str(error.value) == f"ranks 0, 2 wait in {verb} #0 for rank 1"

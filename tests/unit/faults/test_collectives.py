"""Collective faults: what one rank makes of a call, by hand, and whether it says so."""

import pytest
import torch

from moe.faults import arm, wrap_collectives
from topology.collectives import DeadlockError
from topology.loopback import LoopbackWorld

TOKENS = (2, 2)
ALL = (0, 1)


def run(program, *faults, world=2, tokens=TOKENS):
    """(what each rank's program gave, names of the faults that acted on each)."""
    armed = [arm(name, params, tokens) for name, params in faults]

    def faulty(collectives):
        acted = set()
        return program(wrap_collectives(collectives, armed, acted)), acted

    results = LoopbackWorld(world).run(faulty)
    return [got for got, _ in results], [acted for _, acted in results]


def column(*values):
    return torch.tensor(values, dtype=torch.float32).view(-1, 1)


def exchange(verbs):
    """Three all-to-alls of one row to each rank, as one forward makes them."""
    sent = column(10 + verbs.rank, 20 + verbs.rank)
    return [verbs.all_to_all_v(sent, (1, 1), (1, 1), ALL).flatten().tolist() for _ in range(3)]


@pytest.mark.parametrize(("row", "received"), [(0, [0, 21]), (1, [20, 0]), (2, [0, 21])])
def test_a_dropped_partial_is_one_row_of_the_combine_on_one_rank(row, received):
    got, acted = run(exchange, ("partial_dropped", {"row": row, "rank": 1}))
    assert got == [[[10, 11]] * 3, [[20, 21], [20, 21], received]]
    assert acted == [set(), {"partial_dropped"}]


def test_a_dropped_partial_of_a_rank_that_gets_none_changes_nothing():
    def program(verbs):
        none = torch.zeros(0, 1)
        return [verbs.all_to_all_v(none, (0, 0), (0, 0), ALL).shape[0] for _ in range(3)]

    assert run(program, ("partial_dropped", {"rank": 0})) == ([[0] * 3] * 2, [set(), set()])


def gathered(counts):
    """A program that gathers numbered rows over ranks with so many."""

    def program(verbs):
        first = sum(counts[: verbs.rank])
        rows = column(*range(first, first + counts[verbs.rank]))
        return verbs.all_gather_v(rows, counts, tuple(range(len(counts)))).flatten().tolist()

    return program


@pytest.mark.parametrize(
    ("counts", "got"),
    [((2, 1), [0, 1, 0]), ((1, 3), [0, 0, 0, 0]), ((2, 3), [0, 1, 0, 1, 0])],
    ids=str,
)
def test_the_first_chunk_stands_in_every_place(counts, got):
    ranks, acted = run(gathered(counts), ("first_chunk_for_all", {"rank": 1}))
    assert ranks == [list(range(sum(counts))), got]
    assert acted == [set(), {"first_chunk_for_all"}]


def test_an_empty_first_chunk_cannot_be_taken_for_all():
    ranks, acted = run(gathered((0, 2)), ("first_chunk_for_all", {"rank": 1}))
    assert (ranks, acted) == ([[0, 1]] * 2, [set(), set()])


@pytest.mark.parametrize(
    ("counts", "got"),
    [((3, 1), [0, 1, 3, 0]), ((1, 2), [0, 0, 1]), ((2, 2), [0, 1, 2, 3])],
    ids=str,
)
def test_chunks_are_cut_or_filled_to_one_length(counts, got):
    ranks, acted = run(gathered(counts), ("chunks_read_as_equal", {"rank": 0}))
    assert ranks == [got, list(range(sum(counts)))]
    assert acted[0] == ({"chunks_read_as_equal"} if got != ranks[1] else set())


@pytest.mark.parametrize(
    ("counts", "got"),
    [((2, 2), [0, 2, 3, 1]), ((4, 4), [0, 1, 4, 5, 6, 7, 2, 3]), ((3, 3), list(range(6)))],
    ids=str,
)
def test_zigzag_blocks_are_put_into_the_sequences_order(counts, got):
    ranks, _ = run(gathered(counts), ("zigzag_undone", {"rank": 1}))
    assert ranks == [list(range(sum(counts))), got]


def summed(verbs):
    rows = column(1 + verbs.rank, 10 + verbs.rank)
    total = verbs.all_reduce(rows, ALL).flatten().tolist()
    return total, verbs.reduce_scatter_v(rows, (1, 1), ALL).flatten().tolist()


@pytest.mark.parametrize(
    ("fault", "got"),
    [
        ("reduction_missing", ([2, 11], [21])),
        ("reduction_repeated", ([6, 42], [21])),
        ("scatter_without_sum", ([3, 21], [11])),
    ],
)
def test_a_sum_is_missing_or_taken_again_on_one_rank(fault, got):
    ranks, acted = run(summed, (fault, {"rank": 1}))
    assert ranks == [([3, 21], [3]), got]
    assert acted == [set(), {fault}]


def of_pairs(verbs):
    """A gather in pairs of four ranks, as of attention-TP groups."""
    pair = (0, 1) if verbs.rank < 2 else (2, 3)
    return verbs.all_gather_v(column(verbs.rank), (1, 1), pair).flatten().tolist()


def test_a_gather_over_the_world_gives_every_group_the_first_ones_rows():
    ranks, acted = run(of_pairs, ("gathered_over_the_world", {}), world=4, tokens=(1,) * 4)
    assert ranks == [[0, 1]] * 4
    assert acted == [{"gathered_over_the_world"}] * 4


def test_a_group_that_is_the_world_cannot_be_mistaken():
    _, acted = run(gathered((1, 1)), ("gathered_over_the_world", {}))
    assert acted == [set(), set()]


def one_call(op):
    """A program that makes one call of a verb."""

    def program(verbs):
        rows = column(1, 2)
        counts = {"all_gather_v": [(2, 2)], "all_reduce": [], "reduce_scatter_v": [(1, 1)]}
        counts["all_to_all_v"] = [(1, 1), (1, 1)]
        return getattr(verbs, op)(rows, *counts[op], ALL).flatten().tolist()

    return program


VERBS = {"all_gather_v": 4, "all_to_all_v": 2, "all_reduce": 2, "reduce_scatter_v": 1}
"""Rows that come back."""


@pytest.mark.parametrize("op", VERBS)
def test_a_skipped_collective_leaves_the_others_waiting(op):
    with pytest.raises(DeadlockError) as caught:
        run(one_call(op), ("collective_skipped", {"rank": 1, "op": op}))
    (waiting,) = caught.value.waiting
    assert (waiting.op, waiting.present, waiting.missing) == (op, (0,), (1,))


@pytest.mark.parametrize(("op", "num_received"), VERBS.items())
def test_ranks_that_skip_a_collective_go_on_with_zeros(op, num_received):
    ranks, acted = run(one_call(op), ("collective_skipped", {"rank": "all", "op": op}))
    assert ranks == [[0] * num_received] * 2
    assert acted == [{"collective_skipped"}] * 2


def test_the_skipped_combine_is_the_third_exchange():
    with pytest.raises(DeadlockError) as caught:
        run(exchange, ("combine_skipped", {"rank": 1}))
    (waiting,) = caught.value.waiting
    assert (waiting.sequence, waiting.missing) == (2, (1,))


def test_another_plan_shows_when_plans_are_compared_and_in_no_other_vector():
    def program(verbs):
        mine = torch.tensor([7])
        return [verbs.all_gather_v(mine, (1, 1), ALL).tolist() for _ in range(2)]

    ranks, acted = run(program, ("plan_differs", {"rank": 1}))
    assert ranks == [[[7, 9], [7, 7]]] * 2
    assert acted == [set(), {"plan_differs"}]


def compared(verbs):
    """The comparison of plans alone."""
    world = tuple(range(verbs.world_size))
    return verbs.all_gather_v(torch.tensor([7]), [1] * len(world), world).tolist()


def test_ranks_that_were_all_told_another_plan_were_told_different_ones():
    ranks, acted = run(compared, ("plan_differs", {"rank": "all"}))
    assert ranks == [[8, 9]] * 2
    assert acted == [{"plan_differs"}] * 2


def test_a_rank_without_peers_has_none_to_differ_from():
    ranks, acted = run(compared, ("plan_differs", {}), world=1, tokens=(2,))
    assert (ranks, acted) == ([[7]], [set()])


@pytest.mark.parametrize(("values", "acts"), [((), False), ((3, 4), True)], ids=["idle", "busy"])
def test_a_collective_of_one_rank_is_missed_where_it_brings_rows(values, acts):
    skipped = ("collective_skipped", {})
    _, acted = run(
        lambda verbs: verbs.all_reduce(column(*values), (0,)), skipped, world=1, tokens=(2,)
    )
    assert acted == [{"collective_skipped"} if acts else set()]


def test_a_wrapped_rank_is_still_itself():
    ranks, _ = run(lambda verbs: (verbs.rank, verbs.world_size), ("partial_dropped", {}))
    assert ranks == [(0, 2), (1, 2)]

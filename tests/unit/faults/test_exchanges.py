"""Faults of who gives what to whom: what one rank makes of a call, by hand."""

import pytest
import torch

from moe.faults import arm, wrap_collectives
from topology.collectives import DeadlockError
from topology.loopback import LoopbackWorld

ALL = (0, 1, 2)


def run(program, *faults, tokens=(2, 2, 2)):
    """(what each rank's program gave, names of the faults that acted on each)."""
    armed = [arm(name, params, tokens) for name, params in faults]

    def faulty(verbs):
        acted = set()
        return program(wrap_collectives(verbs, armed, acted)), acted

    results = LoopbackWorld(len(tokens)).run(faulty)
    return [got for got, _ in results], [acted for _, acted in results]


def column(*values):
    return torch.tensor(values, dtype=torch.float32).view(-1, 1)


def gather(verbs):
    rows = column(*(10 * verbs.rank + i for i in range(2)))
    return verbs.all_gather_v(rows, (2, 2, 2), ALL).flatten().tolist()


def exchange(verbs):
    """Three all-to-alls of one row to each rank, as one forward makes them."""
    sent = column(*(10 * to + verbs.rank for to in ALL)).to(torch.bfloat16)
    made = [verbs.all_to_all_v(sent, (1, 1, 1), (1, 1, 1), ALL) for _ in range(3)]
    return made[-1].flatten().tolist()


def reduce(verbs):
    return verbs.all_reduce(column(10.0**verbs.rank), ALL).item()


def test_each_chunk_is_the_one_behind():
    got, acted = run(gather, ("chunks_of_next_rank", {"rank": 1}))
    assert got == [[0, 1, 10, 11, 20, 21], [10, 11, 20, 21, 0, 1], [0, 1, 10, 11, 20, 21]]
    assert acted == [set(), {"chunks_of_next_rank"}, set()]


@pytest.mark.parametrize(
    ("fault", "got"),
    [("partial_doubled", [20, 11, 12]), ("partial_of_another_rank", [10, 10, 12])],
)
def test_a_partial_comes_back_wrong_on_one_rank(fault, got):
    ranks, acted = run(exchange, (fault, {"rank": 1}))
    assert ranks == [[0, 1, 2], got, [20, 21, 22]]
    assert acted == [set(), {fault}, set()]


@pytest.mark.parametrize("fault", ["partial_doubled", "partial_of_another_rank"])
def test_a_rank_that_gets_no_partial_has_none_to_change(fault):
    def program(verbs):
        none = torch.zeros(0, 1)
        return [verbs.all_to_all_v(none, (0,) * 3, (0,) * 3, ALL).shape[0] for _ in range(3)]

    assert run(program, (fault, {})) == ([[0] * 3] * 3, [set()] * 3)


def test_the_first_summand_stands_in_the_last_ones_place_on_all_ranks():
    got, acted = run(reduce, ("summand_doubled", {}))
    assert got == [1 + 10 + 1] * 3
    assert acted == [{"summand_doubled"}] * 3


def test_equal_summands_give_the_sum_that_is_due():
    def program(verbs):
        return verbs.all_reduce(column(2.0), ALL).item()

    assert run(program, ("summand_doubled", {})) == ([6.0] * 3, [set()] * 3)


def test_a_sum_of_no_rows_has_no_summand():
    def program(verbs):
        return verbs.all_reduce(torch.zeros(0, 1), ALL).shape[0]

    assert run(program, ("summand_doubled", {})) == ([0] * 3, [set()] * 3)


def test_the_others_wait_for_an_idle_rank_that_leaves():
    with pytest.raises(DeadlockError, match="for rank 1"):
        run(exchange, ("idle_rank_leaves", {}), tokens=(2, 0, 2))


def test_without_an_idle_rank_nobody_leaves():
    got, acted = run(exchange, ("idle_rank_leaves", {}))
    assert got == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]
    assert acted == [set()] * 3

"""A world of threads: results, mismatches, order."""

import pytest
import torch

from topology.collectives import CollectiveMismatchError
from topology.loopback import LoopbackWorld, RankError


def gather_ranks(collectives, group):
    mine = torch.tensor([collectives.rank])
    return collectives.all_gather_v(mine, [1] * len(group), group).tolist()


def failure(world: LoopbackWorld, program) -> RankError:
    with pytest.raises(RankError) as error:
        world.run(program)
    return error.value


def test_results_come_in_rank_order():
    assert LoopbackWorld(3).run(lambda verbs: verbs.rank * 10) == [0, 10, 20]


def test_every_rank_knows_the_size_of_the_world():
    assert LoopbackWorld(3).run(lambda verbs: verbs.world_size) == [3, 3, 3]


def test_all_gather_puts_the_rows_of_the_members_in_group_order():
    rows = [[[1, 2]], [], [[3, 4], [5, 6]]]

    def program(verbs):
        mine = torch.tensor(rows[verbs.rank], dtype=torch.int64).view(-1, 2)
        return verbs.all_gather_v(mine, [1, 0, 2], (0, 1, 2)).tolist()

    assert LoopbackWorld(3).run(program) == [[[1, 2], [3, 4], [5, 6]]] * 3


def test_all_to_all_gives_each_member_its_run():
    # Rank r sends the value 10 * r + d to rank d, SENT[r][d] times.
    sent = [[1, 2, 0], [0, 0, 1], [2, 1, 1]]

    def program(verbs):
        r = verbs.rank
        values = [10 * r + d for d in range(3) for _ in range(sent[r][d])]
        receive = [sent[source][r] for source in range(3)]
        return verbs.all_to_all_v(torch.tensor(values), sent[r], receive, (0, 1, 2)).tolist()

    assert LoopbackWorld(3).run(program) == [[0, 20, 20], [1, 1, 21], [12, 22]]


def test_nobody_with_a_row_receives_nothing():
    def program(verbs):
        empty = torch.zeros(0, 4, dtype=torch.bfloat16)
        return verbs.all_to_all_v(empty, [0, 0], [0, 0], (0, 1))

    results = LoopbackWorld(2).run(program)
    assert [(rows.shape, rows.dtype) for rows in results] == [((0, 4), torch.bfloat16)] * 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int64, torch.float64])
def test_rows_of_any_dtype_arrive_as_they_were_sent(dtype):
    codes = torch.arange(32, dtype=torch.uint8).view(2, 16)

    def program(verbs):
        mine = codes[verbs.rank][None].view(dtype)
        return verbs.all_gather_v(mine, [1, 1], (0, 1)).view(torch.uint8)

    assert all(torch.equal(got, codes) for got in LoopbackWorld(2).run(program))


def test_disjoint_groups_exchange_on_their_own():
    results = LoopbackWorld(4).run(
        lambda verbs: gather_ranks(verbs, (verbs.rank % 2, verbs.rank % 2 + 2))
    )
    assert results == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_group_of_one_gets_its_own_rows_back():
    assert LoopbackWorld(2).run(lambda verbs: gather_ranks(verbs, (verbs.rank,))) == [[0], [1]]


def test_a_group_need_not_ascend():
    assert LoopbackWorld(2).run(lambda verbs: gather_ranks(verbs, (1, 0))) == [[1, 0]] * 2


def test_a_sender_may_reuse_its_buffer_after_the_call():
    def program(verbs):
        buffer = torch.tensor([verbs.rank])
        received = verbs.all_gather_v(buffer, [1, 1, 1], (0, 1, 2))
        buffer.fill_(-1)
        return received.tolist()

    assert LoopbackWorld(3).run(program) == [[0, 1, 2]] * 3


def test_a_receiver_owns_what_it_received():
    def program(verbs):
        received = verbs.all_gather_v(torch.tensor([verbs.rank]), [1, 1, 1], (0, 1, 2))
        seen = received.tolist()
        received.fill_(-1)
        return seen

    assert LoopbackWorld(3).run(program) == [[0, 1, 2]] * 3


def test_sixty_four_ranks_meet():
    world = tuple(range(64))
    assert LoopbackWorld(64).run(lambda verbs: gather_ranks(verbs, world)) == [list(world)] * 64


def two_verbs(verbs):
    rows, group = torch.zeros(2), (0, 1)
    if verbs.rank == 0:
        return verbs.all_gather_v(rows, [2, 2], group)
    return verbs.all_to_all_v(rows, [1, 1], [1, 1], group)


def two_dtypes(verbs):
    rows = torch.zeros(1, dtype=torch.float32 if verbs.rank == 0 else torch.int32)
    return verbs.all_gather_v(rows, [1, 1], (0, 1))


def two_widths(verbs):
    return verbs.all_gather_v(torch.zeros(1, 3 + verbs.rank), [1, 1], (0, 1))


def own_rows_miscounted(verbs):
    return verbs.all_gather_v(torch.zeros(1 + verbs.rank), [1, 1], (0, 1))


def foreign_rows_miscounted(verbs):
    rows = torch.zeros(1 + verbs.rank)
    return verbs.all_gather_v(rows, [1, 2] if verbs.rank else [1, 1], (0, 1))


def fewer_sent_than_expected(verbs):
    receive = [1, 2] if verbs.rank == 0 else [1, 1]
    return verbs.all_to_all_v(torch.zeros(2), [1, 1], receive, (0, 1))


@pytest.mark.parametrize(
    ("program", "rank", "message"),
    [
        (
            two_verbs,
            1,
            r"rank 1 calls all_to_all_v where ranks \[0\] call all_gather_v #0 of group",
        ),
        (
            two_dtypes,
            1,
            r"rank 1 sends torch.int32 rows of \(\), rank 0 torch.float32 rows of \(\)",
        ),
        (two_widths, 1, r"rank 1 sends .* rows of \(4,\), rank 0 .* rows of \(3,\)"),
        (own_rows_miscounted, 1, "all_gather_v: 2 rows where 1 were announced"),
        (foreign_rows_miscounted, 0, "from rank 1: 2 rows where 1 were announced"),
        (fewer_sent_than_expected, 0, "from rank 1: 1 rows where 2 were announced"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_members_that_do_not_agree_are_told_apart(program, rank, message):
    error = failure(LoopbackWorld(2), program)
    assert error.rank == rank
    with pytest.raises(CollectiveMismatchError, match=message):
        raise error.cause


@pytest.mark.parametrize("verb", ["all_gather_v", "all_to_all_v"])
def test_a_rank_outside_the_group_is_refused_by_name(verb):
    counts = ([1, 1],) if verb == "all_gather_v" else ([1, 1], [1, 1])

    def program(verbs):
        return getattr(verbs, verb)(torch.zeros(1), *counts, (1, 2)) if verbs.rank == 0 else None

    cause = failure(LoopbackWorld(3), program).cause
    assert str(cause) == f"rank 0 calls {verb} on group [1, 2] without it"


def test_ranks_run_one_at_a_time_and_switch_only_in_collectives():
    log = []

    def program(verbs):
        log.append((verbs.rank, "before"))
        gather_ranks(verbs, (0, 1, 2))
        log.append((verbs.rank, "after"))

    LoopbackWorld(3).run(program)
    before = [(0, "before"), (1, "before"), (2, "before")]
    assert log == [*before, (2, "after"), (0, "after"), (1, "after")]


def test_the_turn_goes_on_to_the_next_rank_that_can_run():
    log = []

    def program(verbs):
        log.append((verbs.rank, "before"))
        gather_ranks(verbs, (0, 1) if verbs.rank < 2 else (2, 3))
        log.append((verbs.rank, "after"))

    LoopbackWorld(4).run(program)
    # Rank 0 could run again once rank 1 came, but it is the turn of rank 2.
    assert [rank for rank, _ in log] == [0, 1, 1, 2, 3, 3, 0, 2]


def test_two_runs_take_the_same_order():
    def order():
        log = []

        def program(verbs):
            for step, group in enumerate([(0, 1), (2, 3), (0, 1, 2, 3), (1, 3), (0, 2)]):
                log.append((verbs.rank, step))
                if verbs.rank in group:
                    gather_ranks(verbs, group)

        LoopbackWorld(4).run(program)
        return log

    assert order() == order()

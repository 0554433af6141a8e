"""What collectives say about themselves: who waits, and what was called."""

import pytest
import torch

from topology.collectives import (
    CollectiveCall,
    CollectiveMismatchError,
    RecordingCollectives,
    Waiting,
    expect_rows,
    listed_ranks,
    ordered_sum,
    place_in_group,
)
from topology.loopback import LoopbackWorld


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ((2,), "rank 2"),
        ((0, 1), "ranks 0, 1"),
        ((0, 1, 2), "ranks 0-2"),
        ((7, 0, 3, 5, 4), "ranks 0, 3-5, 7"),
    ],
    ids=["one", "two", "run", "unsorted"],
)
def test_ranks_are_listed_as_a_reader_would_write_them(ranks, expected):
    assert listed_ranks(ranks) == expected


@pytest.mark.parametrize(
    ("present", "missing", "expected"),
    [
        ((1,), (0, 2), "rank 1 waits in all_gather_v #3 for ranks 0, 2"),
        ((0, 1), (2,), "ranks 0, 1 wait in all_gather_v #3 for rank 2"),
    ],
    ids=["one", "several"],
)
def test_a_stuck_collective_says_who_waits_for_whom(present, missing, expected):
    waiting = Waiting(op="all_gather_v", sequence=3, present=present, missing=missing)
    assert str(waiting) == expected


def test_unexpected_rows_are_refused_with_both_numbers():
    with pytest.raises(CollectiveMismatchError, match="combine: 3 rows where 2 were announced"):
        expect_rows("combine", torch.zeros(3, 5), 2)


def test_a_rank_outside_the_group_has_no_place_in_it():
    with pytest.raises(ValueError, match=r"rank 3 calls all_gather_v on group \[0, 2\] without it"):
        place_in_group("all_gather_v", 3, (0, 2))


VERBS = ("all_gather_v", "all_to_all_v", "all_reduce", "reduce_scatter_v")


def recorded_run() -> list[tuple[list[CollectiveCall], list[str], list[int]]]:
    def program(collectives):
        entered = []
        recording = RecordingCollectives(collectives, lambda op: entered.append(op) or "dispatch")
        rows = torch.full((2, 3), collectives.rank, dtype=torch.bfloat16)
        gathered = recording.all_gather_v(rows, [2, 2], (0, 1))
        exchanged = recording.all_to_all_v(rows, [1, 1], [1, 1], (0, 1))
        reduced = recording.all_reduce(rows, (0, 1))
        scattered = recording.reduce_scatter_v(rows, [1, 1], (0, 1))
        answers = (gathered, exchanged, reduced, scattered)
        values = [value for answer in answers for value in answer[:, 0].tolist()]
        return recording.calls, entered, values

    return LoopbackWorld(2).run(program)


def test_recording_keeps_stage_operation_group_and_bytes_of_each_call():
    calls = recorded_run()[1][0]
    assert calls == [
        CollectiveCall(stage="dispatch", op=op, group=(0, 1), payload_bytes=12) for op in VERBS
    ]


def test_recording_tells_each_operation_before_it_starts():
    assert recorded_run()[0][1] == list(VERBS)


def test_recording_passes_the_results_on():
    assert [values for _, _, values in recorded_run()] == [[0, 0, 1, 1, 0, 1, 1, 1, 1]] * 2


def test_recording_has_the_rank_and_the_size_of_the_world():
    seen = LoopbackWorld(2).run(
        lambda verbs: (
            RecordingCollectives(verbs, str).rank,
            RecordingCollectives(verbs, str).world_size,
        )
    )
    assert seen == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        (torch.bfloat16, [256.0, 1.0, 1.0], 258.0),
        (torch.float32, [2.0**25, 1.0, -(2.0**25)], 0.0),
        (torch.float64, [2.0**25, 1.0, -(2.0**25)], 1.0),
        (torch.int64, [2**40, 1, 1], 2**40 + 2),
        (torch.bfloat16, [-0.0, 0.0], 0.0),
    ],
    ids=["one-rounding", "fp32-inside", "fp64-stays", "integers", "minus-zero"],
)
def test_a_sum_has_one_order_and_one_rounding(dtype, values, expected):
    total = ordered_sum([torch.tensor([value], dtype=dtype) for value in values])
    assert total.dtype is dtype
    assert torch.equal(total.signbit(), torch.tensor([False]))
    assert total.tolist() == [expected]


def test_a_sum_of_one_part_is_a_copy():
    part = torch.ones(2)
    ordered_sum([part]).fill_(7)
    assert part.tolist() == [1.0, 1.0]

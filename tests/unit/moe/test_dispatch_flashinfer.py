"""FlashInfer's one-sided exchange over a loopback world, against plain loops over routes."""

import pytest
import torch
from torch import Tensor

from moe.dispatch.buffers import MessageBuffers
from moe.dispatch.flashinfer import (
    DECODE_COLLECTIVES,
    FlashInferDispatcher,
    tree_sum,
)
from moe.dispatched import FlashInferDispatchOutput
from moe.formats import Stage
from moe.poison import Fill, filled_with
from moe.stages import CombineInput, PhysicalIds
from topology.collectives import RecordingCollectives
from topology.loopback import LoopbackWorld, RankError

LOCAL_EXPERTS = 2
Routes = list[list[list[int]]]
"""Expert ids by rank, token and slot; two experts a rank, -1 = dropped."""

ROUTES: Routes = [
    [[0, 1, 4, 2], [2, 3, 5, -1], [-1, 0, -1, -1], [-1, -1, -1, -1]],
    [],
    [[4, 5, -1, 1], [0, 5, 2, 3]],
]
HEIGHT = 4
"""The most rows of any rank of ``ROUTES``."""


def hidden_of(rank: int, num_tokens: int) -> Tensor:
    """[T, 4] bf16 rows that say whose they are: 16 * rank + row + 1, then 1, 2, 3."""
    rows = torch.arange(4).repeat(num_tokens, 1).to(torch.bfloat16)
    rows[:, 0] = torch.arange(num_tokens) + 16 * rank + 1
    return rows


def weight_of(rank: int, row: int, slot: int) -> float:
    return 1 + rank + row / 8 + slot / 64


def given(routes: Routes, rank: int) -> tuple[Tensor, PhysicalIds, Tensor]:
    mine = routes[rank]
    weights = [[weight_of(rank, row, slot) for slot in range(4)] for row in range(len(mine))]
    ids = PhysicalIds(torch.tensor(mine, dtype=torch.int32).view(-1, 4))
    return hidden_of(rank, len(mine)), ids, torch.tensor(weights).view(-1, 4)


def dispatcher(verbs, routes: Routes, *, seed: int = 5, buffers: MessageBuffers | None = None):
    return FlashInferDispatcher(
        collectives=verbs,
        group=tuple(range(verbs.world_size)),
        num_local_experts=LOCAL_EXPERTS,
        rows_per_rank=max(map(len, routes)),
        buffers=buffers or MessageBuffers(1),
        message_seed=seed + verbs.rank,
    )


def sent(routes: Routes = ROUTES, **options) -> list[FlashInferDispatchOutput]:
    def program(verbs):
        return dispatcher(verbs, routes, **options).dispatch(*given(routes, verbs.rank))

    return LoopbackWorld(len(routes)).run(program)


def forwards(*rounds: Routes) -> list[FlashInferDispatchOutput]:
    """What rank 0 receives in each of several forwards on the same workspace."""

    def program(verbs):
        here = dispatcher(verbs, rounds[0])
        return [here.dispatch(*given(routes, verbs.rank)) for routes in rounds]

    return LoopbackWorld(len(rounds[0])).run(program)[0]


def sources(output: FlashInferDispatchOutput, height: int = HEIGHT) -> list[tuple[int, int]]:
    """(rank, row) of every written row, by what stands in it."""
    marks = output.hidden_states[written(output, height), 0].int() - 1
    return [divmod(int(mark), 16) for mark in marks]


def written(output: FlashInferDispatchOutput, height: int = HEIGHT) -> list[int]:
    """The first rows of each rank's part, as many as were received from it."""
    counts = output.handle.counts.tolist()
    return [rank * height + row for rank, count in enumerate(counts) for row in range(count)]


@pytest.mark.parametrize(
    ("rank", "expected", "counts"),
    [
        (0, [(0, 0), (0, 2), (2, 0), (2, 1)], [2, 0, 2]),
        (1, [(0, 0), (0, 1), (2, 1)], [2, 0, 1]),
        (2, [(0, 0), (0, 1), (2, 0), (2, 1)], [2, 0, 2]),
    ],
)
def test_a_token_is_written_once_to_every_rank_of_its_experts(rank, expected, counts):
    output = sent()[rank]
    assert sorted(sources(output)) == expected
    assert output.handle.counts.tolist() == counts


def test_every_rank_has_room_for_the_most_rows_of_any_from_each():
    assert [output.hidden_states.shape for output in sent()] == [(12, 4)] * 3


@pytest.mark.parametrize("rank", range(3))
def test_a_row_carries_all_its_ids_and_weights_as_all_ranks_count_them(rank):
    output = sent()[rank]
    rows, origin = written(output), sources(output)
    assert output.topk_ids[rows].tolist() == [ROUTES[source][row] for source, row in origin]
    assert output.topk_weights[rows].tolist() == [
        [weight_of(source, row, slot) for slot in range(4)] for source, row in origin
    ]


def test_ids_are_int32_weights_fp32_and_rows_bf16():
    output = sent()[0]
    assert (output.topk_ids.dtype, output.topk_weights.dtype) == (torch.int32, torch.float32)
    assert output.hidden_states.dtype == torch.bfloat16


def test_rows_that_nobody_wrote_have_no_ids_and_hold_poison_at_first():
    with filled_with(Fill.NAN):
        (output,) = forwards([[[1, 0, -1, -1]], [[-1] * 4, [0, -1, -1, -1], [2, 3, -1, -1]]])
    assert output.handle.counts.tolist() == [1, 1]
    unwritten = [1, 2, 4, 5]
    assert output.topk_ids[unwritten].tolist() == [[-1] * 4] * 4
    assert bool(output.hidden_states[unwritten].isnan().all())


def test_rows_that_nobody_writes_again_hold_the_last_forwards_without_its_ids():
    full = [[[0, 1, -1, -1]] * 3, [[1, 0, -1, -1]] * 3]
    first, second = forwards(full, [[[0, -1, -1, -1]], []])
    assert second.handle.counts.tolist() == [1, 0]
    assert second.topk_ids.tolist() == [[0, -1, -1, -1]] + [[-1] * 4] * 5
    assert torch.equal(second.hidden_states[1:], first.hidden_states[1:])


def test_what_was_handed_over_does_not_change_with_the_next_forward():
    first, _ = forwards([[[0, -1, -1, -1]] * 2, []], [[[1, -1, -1, -1]] * 2, []])
    assert first.topk_ids[:2].tolist() == [[0, -1, -1, -1]] * 2


def test_a_message_belongs_to_the_slot_of_the_first_expert_on_its_rank():
    handles = [output.handle for output in sent()]
    assert handles[0].target_rank.tolist() == [
        [0, -1, 2, 1],
        [1, -1, 2, -1],
        [-1, 0, -1, -1],
        [-1] * 4,
    ]
    assert handles[2].target_rank.tolist() == [[2, -1, -1, 0], [0, 2, 1, -1]]


def test_messages_to_a_rank_are_numbered_without_a_gap():
    for output in sent():
        target, index = output.handle.target_rank, output.handle.send_index
        assert torch.equal(target >= 0, index >= 0)
        for rank in range(3):
            numbers = sorted(index[target == rank].tolist())
            assert numbers == list(range(len(numbers)))


def test_the_seed_decides_the_order_of_messages_and_nothing_else():
    many = [[[0, 1, 2, 3]] * 8, []]
    orders = {tuple(sources(sent(many, seed=seed)[1], 8)) for seed in range(4)}
    assert len(orders) > 1
    assert {tuple(sorted(order)) for order in orders} == {tuple((0, row) for row in range(8))}


@pytest.mark.parametrize(
    "routes", [[[], []], [[[-1] * 4] * 3, [[-1] * 4]]], ids=["no token", "all dropped"]
)
def test_nothing_to_send_writes_no_row(routes):
    for output in sent(routes):
        assert output.handle.counts.tolist() == [0, 0]
        assert bool((output.topk_ids == -1).all())


def test_the_given_rows_are_not_written_into():
    def program(verbs):
        rows = given(ROUTES, verbs.rank)
        before = [tensor._version for tensor in rows]
        dispatcher(verbs, ROUTES).dispatch(*rows)
        return before == [tensor._version for tensor in rows]

    assert LoopbackWorld(3).run(program) == [True] * 3


def combined(partial_of, routes: Routes = ROUTES) -> list[Tensor]:
    """[T, 4] of every rank when ``partial_of(computing rank, source rank, row)`` comes back."""

    def program(verbs):
        here = dispatcher(verbs, routes)
        output = here.dispatch(*given(routes, verbs.rank))
        partial = torch.full(output.hidden_states.shape, torch.nan, dtype=torch.bfloat16)
        height = max(map(len, routes))
        for row, source in zip(written(output, height), sources(output, height), strict=True):
            partial[row] = partial_of(verbs.rank, *source)
        return here.combine(CombineInput(partial=partial), output.handle).routed

    return LoopbackWorld(len(routes)).run(program)


def test_each_rank_adds_its_partial_once_however_many_experts_it_has():
    routed = combined(lambda here, source, row: 2.0**here)
    assert routed[0][:, 0].tolist() == [1 + 2 + 4, 2 + 4, 1, 0]
    assert routed[2][:, 0].tolist() == [4 + 1, 1 + 4 + 2]
    assert routed[1].shape == (0, 4)


def test_partials_come_back_to_the_token_that_they_are_of():
    routed = combined(lambda here, source, row: 16.0 * source + row + 1)
    assert routed[0][:, 0].tolist() == [3 * 1, 2 * 2, 3, 0]
    assert routed[2][:, 0].tolist() == [2 * 33, 3 * 34]


BIG = 2.0**24
"""fp32 does not see 1 beside it, and sees 2."""


@pytest.mark.parametrize(
    ("slots", "total"),
    [
        ([5], 5),
        ([BIG, 1], BIG),
        ([BIG, 1, 1, -BIG], 1),
        ([BIG, 0, 1, 1], BIG + 2),
        ([BIG, 0, 0, 0, 1, 1], BIG + 2),
        ([BIG, 0, 1, 0, 1, 0], BIG),
        ([1, 0, 1, 0, BIG, 0], BIG + 2),
        ([BIG, 0, 1, 1, 1, 0, 1, 0], BIG + 4),
        ([BIG, 1, 1, 0, 1, 0, 0, 0], BIG),
    ],
    ids=lambda value: f"{len(value)} slots" if isinstance(value, list) else "",
)
def test_slots_are_added_as_a_tree_of_neighbours(slots, total):
    """(a0 + a1) + (a2 + a3), and so on; six slots add the last pair at last."""
    assert tree_sum(torch.tensor(slots).float().view(1, -1, 1)).tolist() == [[total]]


@pytest.mark.parametrize("slots", [3, 5, 7, 9, 10])
def test_an_unknown_number_of_slots_is_refused_with_the_known_ones(slots):
    with pytest.raises(ValueError, match=f"num_experts_per_tok {slots}; known: 1, 2, 4, 6, 8"):
        tree_sum(torch.zeros(2, slots, 1))


def test_the_sum_is_rounded_to_bf16_once():
    # 1 + 2^-8 is a tie that goes to 1; with 2^-8 more, fp32 has 1 + 2^-7 before it rounds.
    terms = {0: 1.0, 1: 2.0**-8, 2: 2.0**-8}
    routed = combined(lambda here, source, row: terms[here])
    assert routed[0][0, 0].item() == 1 + 2.0**-7


def test_pending_weights_are_refused():
    def program(verbs):
        here = dispatcher(verbs, ROUTES)
        output = here.dispatch(*given(ROUTES, verbs.rank))
        rows = output.hidden_states
        here.combine(CombineInput(partial=rows, pending_weights=rows), output.handle)

    with pytest.raises(RankError, match="folded before this combine"):
        LoopbackWorld(3).run(program)


def test_the_calls_are_those_that_are_declared_in_order():
    def program(verbs):
        recording = RecordingCollectives(verbs, lambda op: "")
        here = dispatcher(recording, ROUTES)
        output = here.dispatch(*given(ROUTES, verbs.rank))
        dispatched = len(recording.calls)
        here.combine(CombineInput(partial=output.hidden_states), output.handle)
        ops = [call.op for call in recording.calls]
        return [(Stage.DISPATCH, op) for op in ops[:dispatched]] + [
            (Stage.COMBINE, op) for op in ops[dispatched:]
        ]

    assert LoopbackWorld(3).run(program) == [list(DECODE_COLLECTIVES)] * 3

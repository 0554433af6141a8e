"""What FlashInfer's dispatcher does in prefill: all rows to all ranks, and the sums back."""

import pytest
import torch
from torch import Tensor

from moe.dispatch.flashinfer import EXTEND_COLLECTIVES, FlashInferGatherDispatcher
from moe.formats import Stage
from moe.stages import CombineInput, PhysicalIds
from topology.collectives import RecordingCollectives
from topology.loopback import LoopbackWorld, RankError

LOCAL_EXPERTS = 2
ROUTES = [
    [[0, 1, 4], [2, 3, 5], [-1, 0, -1], [-1, -1, -1]],
    [],
    [[4, 5, -1], [0, 5, 2]],
]
"""Expert ids by rank, token and slot; two experts a rank, -1 = dropped."""


def weight_of(rank: int, row: int, slot: int) -> float:
    return 1 + rank + row / 8 + slot / 64


def given(rank: int) -> tuple[Tensor, PhysicalIds, Tensor]:
    """Row t of rank r is 16 * r + t + 1 in every column."""
    mine = ROUTES[rank]
    rows = torch.arange(len(mine))[:, None].repeat(1, 4) + 16 * rank + 1
    weights = [[weight_of(rank, row, slot) for slot in range(3)] for row in range(len(mine))]
    ids = PhysicalIds(torch.tensor(mine, dtype=torch.int32).view(-1, 3))
    return rows.to(torch.bfloat16), ids, torch.tensor(weights).view(-1, 3)


def gatherer(verbs) -> FlashInferGatherDispatcher:
    return FlashInferGatherDispatcher(
        collectives=verbs,
        group=tuple(range(verbs.world_size)),
        num_local_experts=LOCAL_EXPERTS,
        ep_rank=verbs.rank,
        counts=tuple(map(len, ROUTES)),
    )


@pytest.mark.parametrize("rank", range(3))
def test_prefill_brings_all_rows_to_every_rank_with_local_ids(rank):
    def program(verbs):
        return gatherer(verbs).dispatch(*given(verbs.rank))

    output = LoopbackWorld(3).run(program)[rank]
    first = rank * LOCAL_EXPERTS
    assert output.hidden_states[:, 0].tolist() == [1, 2, 3, 4, 33, 34]
    assert output.topk_ids.tolist() == [
        [expert - first if first <= expert < first + LOCAL_EXPERTS else -1 for expert in ids]
        for ids in [*ROUTES[0], *ROUTES[2]]
    ]
    assert output.topk_weights[4:].tolist() == [
        [weight_of(2, row, slot) for slot in range(3)] for row in range(2)
    ]
    assert (output.topk_ids.dtype, output.handle.counts.tolist()) == (torch.int32, [4, 0, 2])
    assert output.physical_ids.tolist() == ROUTES[rank]


def test_prefill_hands_each_rank_the_sum_of_its_own_rows():
    def program(verbs):
        here = gatherer(verbs)
        output = here.dispatch(*given(verbs.rank))
        partial = (output.hidden_states.float() * 2.0**verbs.rank).to(torch.bfloat16)
        return here.combine(CombineInput(partial=partial), output.handle).routed

    routed = LoopbackWorld(3).run(program)
    assert [rows[:, 0].tolist() for rows in routed] == [[7, 14, 21, 28], [], [231, 238]]


def test_the_sum_over_ranks_is_rounded_to_bf16_once():
    # 1 + 2^-8 is a tie that goes to 1; with 2^-8 more, fp32 has 1 + 2^-7 before it rounds.
    def program(verbs):
        here = gatherer(verbs)
        output = here.dispatch(*given(verbs.rank))
        term = (1.0, 2.0**-8, 2.0**-8)[verbs.rank]
        partial = torch.full(output.hidden_states.shape, term, dtype=torch.bfloat16)
        return here.combine(CombineInput(partial=partial), output.handle).routed

    assert LoopbackWorld(3).run(program)[0][0, 0].item() == 1 + 2.0**-7


def test_pending_weights_are_refused():
    def program(verbs):
        here = gatherer(verbs)
        output = here.dispatch(*given(verbs.rank))
        rows = output.hidden_states
        here.combine(CombineInput(partial=rows, pending_weights=rows), output.handle)

    with pytest.raises(RankError, match="folded before this combine"):
        LoopbackWorld(3).run(program)


def test_the_calls_are_those_that_are_declared_in_order():
    def program(verbs):
        recording = RecordingCollectives(verbs, lambda op: "")
        here = gatherer(recording)
        output = here.dispatch(*given(verbs.rank))
        dispatched = len(recording.calls)
        here.combine(CombineInput(partial=output.hidden_states), output.handle)
        ops = [call.op for call in recording.calls]
        return [(Stage.DISPATCH, op) for op in ops[:dispatched]] + [
            (Stage.COMBINE, op) for op in ops[dispatched:]
        ]

    assert LoopbackWorld(3).run(program) == [list(EXTEND_COLLECTIVES)] * 3

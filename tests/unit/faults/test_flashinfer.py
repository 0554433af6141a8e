"""A dropped route's message to the first rank, as that rank sees it from itself."""

import pytest
import torch

from moe.dispatched import FlashInferDispatchOutput, FlashInferHandle
from moe.faults.flashinfer import dropped_route_to_first_rank
from moe.formats import Stage
from moe.stages import GlueInOutput, LogicalIds, TopKOutput
from tests.unit.faults.values import context, received


def sent(physical_ids):
    """Two tokens and two slots; token 0 has an expert on rank 0, which owns slots 0 and 1."""
    return FlashInferDispatchOutput(
        physical_ids=torch.tensor(physical_ids, dtype=torch.int32),
        hidden_states=torch.zeros(4, 2, dtype=torch.bfloat16),
        topk_ids=torch.full((4, 2), -1, dtype=torch.int32),
        topk_weights=torch.zeros(4, 2),
        handle=FlashInferHandle(
            target_rank=torch.tensor([[0, -1], [1, -1]], dtype=torch.int32),
            send_index=torch.tensor([[0, -1], [0, -1]], dtype=torch.int32),
            counts=torch.tensor([1, 0]),
        ),
    )


def seen():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    ids = LogicalIds(torch.tensor([[0, -1], [2, -1]], dtype=torch.int32))
    return {
        Stage.GLUE_IN: GlueInOutput(own=rows, hidden_states=rows),
        Stage.ROUTE: TopKOutput(
            logits=torch.zeros(2, 4), topk_ids=ids, topk_weights=torch.tensor([[0.5, 0], [0.25, 0]])
        ),
    }


def let_loose(value, rank=0, num_slots=4):
    return dropped_route_to_first_rank(
        value, context(seen(), rank=rank, num_ranks=2, num_slots=num_slots)
    )


def test_a_token_without_an_expert_on_rank_0_arrives_there_behind_the_others():
    wrong = let_loose(sent([[0, -1], [2, -1]]))
    assert wrong.handle.counts.tolist() == [2, 0]
    assert wrong.hidden_states.tolist() == [[0, 0], [3, 4], [0, 0], [0, 0]]
    assert wrong.topk_ids[1].tolist() == [2, -1]
    assert wrong.topk_weights[1].tolist() == [0.25, 0]


def test_the_message_belongs_to_the_slot_of_the_dropped_route():
    wrong = let_loose(sent([[0, -1], [2, -1]]))
    assert wrong.handle.target_rank.tolist() == [[0, -1], [1, 0]]
    assert wrong.handle.send_index.tolist() == [[0, -1], [0, 1]]


@pytest.mark.parametrize(
    ("ids", "rank", "num_slots"),
    [([[0, 1], [2, 3]], 0, 4), ([[0, -1], [2, -1]], 1, 4), ([[0, -1], [2, -1]], 0, 2)],
    ids=["nothing dropped", "another rank", "one expert a rank"],
)
def test_nothing_else_is_sent(ids, rank, num_slots):
    value = sent(ids)
    assert let_loose(value, rank, num_slots) is value


def test_another_dispatcher_sends_nothing_more():
    value = received()
    assert let_loose(value) is value

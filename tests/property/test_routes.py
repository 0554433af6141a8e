"""Laws of the way there and back that hold for every routing over one to six ranks."""

from collections import Counter

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from moe.formats import ScaleFormat
from tests.property.batches import (
    NOBODY_HAS_A_TOKEN,
    ONE_HOT_EXPERT,
    Batch,
    batches,
    some_batches,
)
from tests.property.pipeline import RankRun, forward, hidden_of, identity, mlp, weights_of


@some_batches
def test_every_route_arrives_once_and_none_besides(batch):
    runs = forward(batch, identity)
    arrived = Counter(
        (int(run.sent.handle.source_rank[row]), int(run.sent.handle.source_row[row]), slot, expert)
        for rank, run in enumerate(runs)
        for row, ids in enumerate(run.sent.topk_ids.tolist())
        for slot, local in enumerate(ids)
        if local >= 0
        for expert in [local + rank * batch.num_local]
    )
    assert arrived == Counter(
        (rank, row, slot, expert)
        for rank, tokens in enumerate(batch.tokens)
        for row, token in enumerate(tokens)
        for slot, expert in enumerate(token)
        if expert >= 0
    )


@some_batches
def test_a_received_row_has_a_route_on_the_rank(batch):
    for run in forward(batch, identity):
        assert bool((run.sent.topk_ids >= 0).any(dim=1).all())


@some_batches
def test_a_segment_is_as_long_as_its_routes_rounded_up_to_128(batch):
    routes = Counter(e for tokens in batch.tokens for token in tokens for e in token)
    for rank, run in enumerate(forward(batch, identity)):
        rows = Counter(run.grouped.rows.m_indices.tolist())
        for local in range(batch.num_local):
            count = routes[local + rank * batch.num_local]
            assert rows[local] == (count + 127) // 128 * 128


@some_batches
def test_every_route_gets_a_row_of_its_own_in_its_experts_segment(batch):
    for run in forward(batch, identity):
        index, ids = run.grouped.restore.output_index, run.sent.topk_ids
        rows = index[ids >= 0]
        assert rows.unique().numel() == rows.numel()
        assert torch.equal(run.grouped.rows.m_indices[rows].to(torch.int64), ids[ids >= 0])


@some_batches
def test_exactly_the_rows_of_no_route_are_poison(batch):
    for run in forward(batch, identity):
        index = run.grouped.restore.output_index
        poisoned = run.grouped.rows.hidden_states.isnan().all(dim=1)
        assert set(poisoned.logical_not().nonzero()[:, 0].tolist()) == set(
            index[index >= 0].tolist()
        )


@some_batches
def test_identity_experts_give_back_each_token_times_its_weights(batch):
    runs, number = forward(batch, identity), 0
    for tokens, run in zip(batch.tokens, runs, strict=True):
        for row, token in enumerate(tokens):
            weights = weights_of(number, batch.top_k).to(torch.float64)
            total = sum(w for w, expert in zip(weights.tolist(), token, strict=True) if expert >= 0)
            expected = hidden_of(number).to(torch.float64) * total
            got = run.combined.routed[row].to(torch.float64)
            # One rounding to bf16 on each rank and one at the end, fp32 sums between.
            assert bool(((got - expected).abs() <= 2.1 * 2.0**-8 * expected.abs()).all())
            number += 1


@some_batches
def test_the_order_of_arrival_changes_no_bit(batch):
    experts = mlp(ScaleFormat.NONE)
    for first, second in zip(
        forward(batch, experts, seed=1), forward(batch, experts, seed=2), strict=True
    ):
        assert torch.equal(first.combined.routed, second.combined.routed)


@given(batch=batches(), random=st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_renaming_tokens_renames_the_output_rows_bitwise(batch, random):
    tokens = batch.all_tokens
    assume(tokens)
    order = random.sample(range(len(tokens)), len(tokens))
    shuffled, rest = [], [tokens[number] for number in order]
    for rank in batch.tokens:
        shuffled.append(tuple(rest[: len(rank)]))
        rest = rest[len(rank) :]
    renamed = Batch(batch.num_experts, batch.top_k, tuple(shuffled))
    experts = mlp(ScaleFormat.NONE)
    before = torch.cat([run.combined.routed for run in forward(batch, experts)])
    after = forward(
        renamed,
        experts,
        hidden=lambda number: hidden_of(order[number]),
        weights=lambda number, top_k: weights_of(order[number], top_k),
    )
    assert torch.equal(torch.cat([run.combined.routed for run in after]), before[order])


def expert_rows(batch: Batch, runs: list[RankRun]) -> dict[tuple[int, int], list[float]]:
    """Expert output by (global token, slot)."""
    starts = [sum(map(len, batch.tokens[:rank])) for rank in range(batch.num_ranks)]
    rows = {}
    for run in runs:
        for row, slots in enumerate(run.grouped.restore.output_index.tolist()):
            handle = run.sent.handle
            token = starts[int(handle.source_rank[row])] + int(handle.source_row[row])
            for slot, place in enumerate(slots):
                if place >= 0:
                    rows[token, slot] = run.output[place].tolist()
    return rows


@pytest.mark.parametrize("scale_format", [ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0])
@given(batch=batches())
@example(batch=NOBODY_HAS_A_TOKEN)
@example(batch=ONE_HOT_EXPERT)
@settings(max_examples=10)
def test_one_rank_and_many_compute_the_same_expert_rows_bitwise(scale_format, batch):
    experts, together = mlp(scale_format), batch.on_one_rank()
    many = forward(batch, experts, scale_format=scale_format)
    one = forward(together, experts, scale_format=scale_format)
    assert expert_rows(batch, many) == expert_rows(together, one)

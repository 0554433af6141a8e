"""DeepEP v2 with expansion over a loopback world: one row a route in a buffer of fixed size."""

from functools import partial

import pytest
import torch
from torch import Tensor

from moe.dispatch.deepep_v2 import DeepEpV2Messages
from moe.dispatch.deepep_v2_expanded import DeepEpV2ExpandedDispatcher
from moe.dispatch.token_exchange import TokenExchange
from moe.dispatched import DeepEpV2ExpandedDispatchOutput
from moe.formats import ScaleFormat
from moe.quant.fp8 import group_scales, quantize_groups
from moe.stages import CombineInput, PhysicalIds
from topology.loopback import LoopbackWorld, RankError

LOCAL_EXPERTS = 3
CAPACITY = 150
Routes = list[list[list[int]]]
"""Expert ids by rank, token and slot; three experts a rank, -1 = dropped."""

ROUTES: Routes = [[[0, 2, 4], [5, 3, 2]], [], [[8, 2, -1], [-1, -1, -1], [2, 1, 0]]]
ROWS = {
    0: {(0, 0, 0): 0, (2, 2, 2): 0, (2, 2, 1): 1, (0, 0, 1): 2, (0, 1, 2): 2, (2, 0, 1): 2}
    | {(2, 2, 0): 2},
    1: {(0, 1, 1): 0, (0, 0, 2): 1, (0, 1, 0): 2},
    2: {(2, 0, 0): 2},
}
"""Rank -> (source rank, row, slot) -> local expert."""


def dispatcher(verbs, *, seed: int = 5, scale_format: ScaleFormat | None = None):
    quantize = partial(quantize_groups, scale_format=scale_format) if scale_format else None
    exchange = TokenExchange(
        collectives=verbs,
        group=tuple(range(verbs.world_size)),
        num_local_experts=LOCAL_EXPERTS,
        arrival_seed=seed + verbs.rank,
    )
    messages = DeepEpV2Messages(exchange=exchange, quantize=quantize, capacity=CAPACITY)
    return DeepEpV2ExpandedDispatcher(messages=messages, expert_alignment=128, top_k=3)


def weight_of(rank: int, row: int, slot: int) -> float:
    return 1 + rank + row / 8 + slot / 64


def dispatch(verbs, routes: Routes, *, width: int = 4, **options) -> DeepEpV2ExpandedDispatchOutput:
    mine, rank = routes[verbs.rank], verbs.rank
    hidden = torch.arange(width).repeat(len(mine), 1).to(torch.bfloat16)
    hidden[:, 0] = torch.arange(len(mine)) + 16 * rank
    weights = [[weight_of(rank, row, slot) for slot in range(3)] for row in range(len(mine))]
    return dispatcher(verbs, **options).dispatch(
        hidden,
        PhysicalIds(torch.tensor(mine, dtype=torch.int32).view(-1, 3)),
        torch.tensor(weights).view(-1, 3),
    )


def sent(routes: Routes = ROUTES, **options) -> list[DeepEpV2ExpandedDispatchOutput]:
    return LoopbackWorld(len(routes)).run(lambda verbs: dispatch(verbs, routes, **options))


def sources(output: DeepEpV2ExpandedDispatchOutput) -> dict[int, tuple[int, int, int]]:
    """Expanded row -> (rank, row, slot) of its route."""
    handle = output.handle
    of_row = torch.stack([handle.source_rank, handle.source_row, handle.source_slot], dim=1)
    rows = (handle.source_rank >= 0).nonzero()[:, 0].tolist()
    return {row: tuple(of_row[row].tolist()) for row in rows}


def test_the_buffer_has_room_for_whatever_the_ranks_may_send():
    """3 * 150 * min(3, 3) + 127 * 3 = 1731 rows, in whole 128s."""
    output = sent()[0]
    assert output.hidden_states.shape == (1792, 4)
    assert output.topk_weights.shape == (1792,)
    assert output.handle.source_slot.shape == (1792,)


def test_a_slab_would_hold_all_rows_of_all_ranks():
    assert sent()[0].masked_max_m == 450


@pytest.mark.parametrize("rank", range(3))
def test_every_route_has_a_row_in_its_experts_segment(rank):
    """Few enough routes that segment e starts at 128 times the experts before it with any."""
    output = sent()[rank]
    held = sorted(set(ROWS[rank].values()))
    got = {source: held[row // 128] for row, source in sources(output).items()}
    assert got == ROWS[rank]


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, [2, 129, 260]), (1, [1, 129, 257]), (2, [0, 0, 1])]
)
def test_psum_is_the_aligned_start_of_a_segment_and_its_routes(rank, expected):
    psum = sent()[rank].psum
    assert (psum.tolist(), psum.dtype) == (expected, torch.int32)


def test_a_segment_of_more_than_128_rows_pushes_the_next_one_back():
    output = sent([[[0, 1, -1]] * 129, [], []])[0]
    assert output.psum.tolist() == [129, 256 + 129, 512]
    assert min(row for row in sources(output) if row >= 129) == 256


@pytest.mark.parametrize("rank", range(3))
def test_rows_of_a_segment_lie_from_its_start_on(rank):
    output = sent()[rank]
    psum, start, due = output.psum.tolist(), 0, []
    for end in psum:
        due += range(start, end)
        start = -(-end // 128) * 128
    assert sorted(sources(output)) == due


@pytest.mark.parametrize("rank", range(3))
def test_a_row_holds_its_token_and_its_weight(rank):
    output = sent()[rank]
    for row, (source, token, slot) in sources(output).items():
        assert output.hidden_states[row].tolist() == [16.0 * source + token, 1.0, 2.0, 3.0]
        assert output.topk_weights[row] == weight_of(source, token, slot)


@pytest.mark.parametrize("scale_format", [None, ScaleFormat.FP32, ScaleFormat.UE8M0], ids=str)
def test_rows_of_no_route_are_poison_and_have_no_source(scale_format):
    output = sent(width=256, scale_format=scale_format)[0]
    handle, real = output.handle, list(sources(output))
    free = torch.ones(1792, dtype=torch.bool)
    free[real] = False
    assert bool(output.hidden_states[free].to(torch.float32).isnan().all())
    assert bool(output.topk_weights[free].isnan().all())
    for index in (handle.source_rank, handle.source_row, handle.source_slot, handle.message):
        assert bool((index[free] == -1).all())


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_codes_and_scales_of_a_row_are_those_on_the_wire(scale_format):
    outputs = sent(width=256, scale_format=scale_format)
    scales = [group_scales(output.wire_scale, 2) for output in outputs]
    arrived = group_scales(outputs[0].hidden_states_scale, 2)
    for row, (source, token, _) in sources(outputs[0]).items():
        codes, wire = outputs[0].hidden_states[row], outputs[source].wire[token]
        assert codes.view(torch.uint8).tolist() == wire.view(torch.uint8).tolist()
        assert arrived[row].tolist() == scales[source][token].tolist()


def test_packed_scales_of_the_buffer_are_mn_major():
    scale = sent(width=640, scale_format=ScaleFormat.UE8M0)[0].hidden_states_scale
    assert (scale.shape, scale.stride()) == ((1792, 2), (1, 1792))


def test_a_rank_without_tokens_sends_nothing():
    outputs = sent([[], [], []])
    assert all(not sources(output) for output in outputs)
    assert [output.psum.tolist() for output in outputs] == [[0, 0, 0]] * 3


def test_more_rows_than_the_buffers_hold_are_refused():
    with pytest.raises(RankError, match="takes 150 rows a rank, rank 0 sends 151"):
        sent([[[0, 1, 2]] * 151, [], []])


def test_full_ranks_that_all_want_one_expert_fit():
    output = sent([[[1, -1, -1]] * 150, [[1, 0, 2]] * 150, [[2, 1, 0]] * 150])[0]
    assert output.psum.tolist() == [300, 384 + 450, 896 + 300]


def combined(routes: Routes, value_of, seed: int = 5) -> list[Tensor]:
    """Dispatch, then send back ``value_of(source rank, row, slot)`` for every route, NaN beside."""

    def program(verbs):
        output = dispatch(verbs, routes, seed=seed)
        partials = torch.full((1792, 2), torch.nan, dtype=torch.bfloat16)
        for row, source in sources(output).items():
            partials[row] = value_of(*source)
        here = dispatcher(verbs, seed=seed)
        return here.combine(CombineInput(partial=partials), output.handle).routed

    return LoopbackWorld(len(routes)).run(program)


def test_every_routes_row_comes_back_to_its_token():
    outputs = combined(ROUTES, lambda rank, row, slot: (1 + rank + row) * 4.0**slot)
    assert outputs[0][:, 0].tolist() == [21.0, 42.0]
    assert outputs[2][:, 0].tolist() == [3 * 5.0, 0.0, 5 * 21.0]
    assert (outputs[1].shape, outputs[1].dtype) == ((0, 2), torch.bfloat16)


def first_token(route: list[int], *values: float) -> float:
    """What one token of rank 0 gets back for these values of its slots."""
    return float(combined([[route], [], []], lambda rank, row, slot: values[slot])[0][0, 0])


def test_two_rows_of_a_rank_are_added_in_bf16_before_they_travel():
    # 1 + 2^-8 is a tie that rounds back to 1, on the rank and at home again.
    assert first_token([0, 1, 3], 1.0, 2.0**-8, 2.0**-8) == 1.0


def test_more_rows_of_a_rank_are_rounded_once():
    assert first_token([0, 1, 2], 1.0, 2.0**-8, 2.0**-8) == 1.0078125


def test_sums_of_ranks_are_rounded_once_at_home():
    assert first_token([0, 3, 6], 1.0, 2.0**-8, 2.0**-8) == 1.0078125


@pytest.mark.parametrize(
    ("route", "expected"),
    [([6, 0, 3], 0.0), ([0, 3, 6], 0.0), ([0, 1, 2], 0.0)],
    ids=["three ranks", "ascending", "one rank"],
)
def test_slots_are_added_in_order_wherever_they_were_computed(route, expected):
    # 2^24 + 1 is 2^24 in fp32, so only another order would keep the one.
    assert first_token(route, 2.0**24, 1.0, -(2.0**24)) == expected


def test_a_rank_counts_at_its_first_slot():
    # Rank 0 has slots 0 and 2: 2^24 - 2^24 first, then 1 of rank 1; by slots the 1 would be lost.
    assert first_token([0, 3, 1], 2.0**24, 1.0, -(2.0**24)) == 1.0


def test_weights_that_nobody_folded_are_refused():
    def program(verbs):
        output = dispatch(verbs, ROUTES)
        unfolded = CombineInput(partial=output.hidden_states, pending_weights=output.topk_weights)
        return dispatcher(verbs).combine(unfolded, output.handle)

    with pytest.raises(RankError, match="weights are folded before this combine"):
        LoopbackWorld(3).run(program)


MANY: Routes = [[[t % 3, 4, 6 + t % 3] for t in range(40)], [], [[0, 4, 2]] * 20]


def test_rows_of_a_segment_come_in_an_order_that_the_seed_decides():
    first, same, other = ([sources(one) for one in sent(MANY, seed=seed)] for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_the_order_of_arrival_changes_no_result():
    def value_of(rank: int, row: int, slot: int) -> float:
        return 1 + rank / 3 + row / 7 + slot / 11

    first, second = (combined(MANY, value_of, seed=seed) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

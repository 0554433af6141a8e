"""DeepEP's normal mode over a loopback world, against plain loops over routes."""

from functools import partial

import pytest
import torch
from torch import Tensor

from moe.dispatch.deepep_normal import DeepEpNormalDispatcher
from moe.dispatch.token_exchange import TokenExchange
from moe.dispatched import DeepEpNormalDispatchOutput
from moe.formats import ScaleFormat
from moe.quant.fp8 import group_scales, quantize_groups
from moe.stages import CombineInput, CombineOutput, PhysicalIds
from topology.loopback import LoopbackWorld, RankError

LOCAL_EXPERTS = 2
Routes = list[list[list[int]]]
"""Expert ids by rank, token and slot; two experts a rank, -1 = dropped."""

ROUTES: Routes = [
    [[0, 1, 4], [2, 3, 5], [-1, 0, -1], [-1, -1, -1]],
    [],
    [[4, 5, -1], [0, 5, 2]],
]


def hidden_of(rank: int, num_tokens: int, width: int = 4) -> Tensor:
    """[T, width] bf16 rows that say whose they are: 16 * rank + row, then 1, 2, ..."""
    rows = torch.arange(width).repeat(num_tokens, 1).to(torch.bfloat16)
    rows[:, 0] = torch.arange(num_tokens) + 16 * rank
    return rows


def weight_of(rank: int, row: int, slot: int) -> float:
    return 1 + rank + row / 8 + slot / 64


def dispatcher(verbs, *, seed: int = 5, scale_format: ScaleFormat | None = None):
    quantize = partial(quantize_groups, scale_format=scale_format) if scale_format else None
    exchange = TokenExchange(
        collectives=verbs,
        group=tuple(range(verbs.world_size)),
        num_local_experts=LOCAL_EXPERTS,
        arrival_seed=seed + verbs.rank,
    )
    return DeepEpNormalDispatcher(exchange=exchange, expert_alignment=128, quantize=quantize)


def dispatch(verbs, routes: Routes, *, width: int = 4, **options) -> DeepEpNormalDispatchOutput:
    mine, rank = routes[verbs.rank], verbs.rank
    weights = [[weight_of(rank, row, slot) for slot in range(3)] for row in range(len(mine))]
    return dispatcher(verbs, **options).dispatch(
        hidden_of(rank, len(mine), width),
        PhysicalIds(torch.tensor(mine, dtype=torch.int32).view(-1, 3)),
        torch.tensor(weights).view(-1, 3),
    )


def sent(routes: Routes = ROUTES, **options) -> list[DeepEpNormalDispatchOutput]:
    return LoopbackWorld(len(routes)).run(lambda verbs: dispatch(verbs, routes, **options))


def sources(output: DeepEpNormalDispatchOutput) -> list[tuple[int, int]]:
    """(rank, row) of every received row, in arrival order."""
    handle = output.handle
    return list(zip(handle.source_rank.tolist(), handle.source_row.tolist(), strict=True))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [(0, 0), (0, 2), (2, 1)]),
        (1, [(0, 1), (2, 1)]),
        (2, [(0, 0), (0, 1), (2, 0), (2, 1)]),
    ],
)
def test_a_token_goes_once_to_every_rank_of_its_experts(rank, expected):
    assert sorted(sources(sent()[rank])) == expected


@pytest.mark.parametrize("rank", range(3))
def test_the_handle_names_the_row_that_arrived(rank):
    output = sent()[rank]
    expected = [float(16 * source + row) for source, row in sources(output)]
    assert output.hidden_states[:, 0].tolist() == expected


@pytest.mark.parametrize("rank", range(3))
def test_ids_arrive_local_and_minus_one_elsewhere(rank):
    output = sent()[rank]
    first = rank * LOCAL_EXPERTS
    expected = [
        [e - first if first <= e < first + LOCAL_EXPERTS else -1 for e in ROUTES[source][row]]
        for source, row in sources(output)
    ]
    assert output.topk_ids.tolist() == expected


@pytest.mark.parametrize("rank", range(3))
def test_weights_arrive_with_their_routes_and_zero_elsewhere(rank):
    output = sent()[rank]
    expected = [
        [
            weight_of(source, row, slot) if expert // LOCAL_EXPERTS == rank else 0.0
            for slot, expert in enumerate(ROUTES[source][row])
        ]
        for source, row in sources(output)
    ]
    assert output.topk_weights.tolist() == expected


def test_ids_arrive_as_int64_and_weights_as_fp32():
    output = sent()[0]
    assert (output.topk_ids.dtype, output.topk_weights.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(1, [128, 0]), (128, [128, 0]), (129, [256, 0])],
    ids=lambda value: str(value),
)
def test_announced_rows_are_routes_rounded_up_to_128(num_tokens, expected):
    routes = [[], [[2, -1, -1]] * num_tokens]
    assert sent(routes)[1].num_recv_tokens_per_expert.tolist() == expected


def test_routes_of_all_ranks_are_counted_together():
    routes = [[[0, -1, -1]] * 100, [[0, 1, -1]] * 29]
    assert sent(routes)[0].num_recv_tokens_per_expert.tolist() == [256, 128]


def test_two_experts_of_one_rank_take_one_message():
    output = sent([[[2, 3, -1]], []])[1]
    assert output.hidden_states.shape[0] == 1
    assert output.topk_ids.tolist() == [[0, 1, -1]]


def test_dropped_tokens_are_sent_nowhere():
    outputs = sent([[[-1, -1, -1]] * 3, [[-1, -1, -1]]])
    assert [output.hidden_states.shape for output in outputs] == [(0, 4)] * 2


def test_a_rank_without_rows_announces_none():
    assert sent([[], []])[0].num_recv_tokens_per_expert.tolist() == [0, 0]


def test_every_token_may_go_to_one_rank():
    outputs = sent([[[0, 1, -1]] * 5, [[1, -1, -1]] * 7])
    assert [output.hidden_states.shape[0] for output in outputs] == [12, 0]


def test_the_wire_is_what_this_rank_sent():
    assert torch.equal(sent()[0].wire, hidden_of(0, 4))


def test_counts_in_the_handle_are_rows_for_and_from_each_rank():
    handles = [output.handle for output in sent()]
    assert [handle.send_counts.tolist() for handle in handles] == [[2, 1, 2], [0, 0, 0], [1, 1, 2]]
    assert [handle.recv_counts.tolist() for handle in handles] == [[2, 0, 1], [1, 0, 1], [2, 0, 2]]


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_scales_arrive_with_their_rows(scale_format):
    outputs = sent(width=640, scale_format=scale_format)
    wires = [group_scales(output.wire_scale, 5) for output in outputs]
    for output in outputs:
        arrived = group_scales(output.hidden_states_scale, 5)
        expected = [wires[rank][row].tolist() for rank, row in sources(output)]
        assert arrived.tolist() == expected


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_codes_arrive_as_they_were_sent(scale_format):
    outputs = sent(width=640, scale_format=scale_format)
    wires = [output.wire.view(torch.uint8) for output in outputs]
    for output in outputs:
        expected = [wires[rank][row].tolist() for rank, row in sources(output)]
        assert output.hidden_states.view(torch.uint8).tolist() == expected


def test_packed_scales_arrive_mn_major():
    scale = sent(width=640, scale_format=ScaleFormat.UE8M0)[2].hidden_states_scale
    assert (scale.shape, scale.stride()) == ((4, 2), (1, 4))


def test_a_single_packed_column_travels():
    scale = sent(width=256, scale_format=ScaleFormat.UE8M0)[2].hidden_states_scale
    assert (scale.shape, scale.stride()) == ((4, 1), (1, 4))


def combined(routes: Routes, partial_of, seed: int = 5) -> list[CombineOutput]:
    """Dispatch, then send back ``partial_of(computing rank, source rank, row)`` in each column."""

    def program(verbs):
        here = dispatcher(verbs, seed=seed)
        output = dispatch(verbs, routes, seed=seed)
        values = [[partial_of(verbs.rank, *source)] * 4 for source in sources(output)]
        partials = torch.tensor(values, dtype=torch.bfloat16).view(-1, 4)
        return here.combine(CombineInput(partial=partials), output.handle)

    return LoopbackWorld(len(routes)).run(program)


def test_every_partial_comes_back_to_its_token():
    outputs = combined(ROUTES, lambda here, source, row: 10.0**here * (1 + source + row))
    # Token (0, 0) went to ranks 0 and 2, (0, 1) to 1 and 2, (0, 2) to 0, (0, 3) nowhere.
    assert outputs[0].routed[:, 0].tolist() == [101.0, 220.0, 3.0, 0.0]
    # Token (2, 0) went to rank 2, token (2, 1) to all three; 444 in bf16 is exact.
    assert outputs[2].routed[:, 0].tolist() == [300.0, 444.0]


def test_a_rank_without_tokens_gets_no_rows():
    routed = combined(ROUTES, lambda *_: 1.0)[1].routed
    assert (routed.shape, routed.dtype) == ((0, 4), torch.bfloat16)


EVERYWHERE: Routes = [[[0, 2, 4]], [], []]


def test_partials_are_added_in_ascending_rank_order():
    # 2^24 + 1 is 2^24 in fp32, so ascending order loses the one; any other order keeps it.
    terms = [2.0**24, 1.0, -(2.0**24)]
    assert combined(EVERYWHERE, lambda here, *_: terms[here])[0].routed.tolist() == [[0.0] * 4]


def test_the_sum_is_rounded_to_bf16_once():
    # Each 2^-8 alone is a tie that rounds back to 1; together they are one step of bf16.
    terms = [1.0, 2.0**-8, 2.0**-8]
    got = combined(EVERYWHERE, lambda here, *_: terms[here])[0].routed
    assert got.tolist() == [[1.0078125] * 4]


def test_weights_that_nobody_folded_are_refused():
    def program(verbs):
        output = dispatch(verbs, ROUTES)
        unfolded = CombineInput(partial=output.hidden_states, pending_weights=output.topk_weights)
        return dispatcher(verbs).combine(unfolded, output.handle)

    with pytest.raises(RankError, match="weights are folded before this combine"):
        LoopbackWorld(3).run(program)


MANY: Routes = [[[t % 4, 4 + t % 2, -1] for t in range(40)], [], [[0, 4, 2]] * 20]


def test_rows_arrive_in_an_order_that_the_seed_decides():
    assert [sources(output) for output in sent(MANY, seed=1)] != [
        sources(output) for output in sent(MANY, seed=2)
    ]


def test_the_same_seed_gives_the_same_order():
    assert [sources(output) for output in sent(MANY, seed=1)] == [
        sources(output) for output in sent(MANY, seed=1)
    ]


def test_the_order_of_arrival_changes_no_result():
    def partial_of(here: int, source: int, row: int) -> float:
        return 1 + here / 3 + source / 7 + row / 11

    first, second = (combined(MANY, partial_of, seed=seed) for seed in (1, 2))
    assert all(torch.equal(a.routed, b.routed) for a, b in zip(first, second, strict=True))

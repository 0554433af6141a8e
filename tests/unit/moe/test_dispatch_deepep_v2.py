"""DeepEP v2 without expansion over a loopback world: psum, dummies, limits, the order of sums."""

from functools import partial

import pytest
import torch
from torch import Tensor

from moe.dispatch.deepep_v2 import DeepEpV2Dispatcher, DeepEpV2Messages
from moe.dispatch.token_exchange import TokenExchange
from moe.dispatched import DeepEpV2DispatchOutput
from moe.formats import ScaleFormat
from moe.quant.fp8 import quantize_groups
from moe.stages import CombineInput, PhysicalIds
from topology.loopback import LoopbackWorld, RankError

LOCAL_EXPERTS = 2
Routes = list[list[list[int]]]
"""Expert ids by rank, token and slot; two experts a rank, -1 = dropped."""

ROUTES: Routes = [[[0, 1, 4], [2, 3, 5]], [], [[4, 5, -1], [0, 5, 2]]]


def hidden_of(rank: int, num_tokens: int, width: int = 4) -> Tensor:
    """[T, width] bf16 rows that say whose they are: 16 * rank + row + 1, then 1, 2, ..."""
    rows = torch.arange(width).repeat(num_tokens, 1).to(torch.bfloat16)
    rows[:, 0] = torch.arange(num_tokens) + 16 * rank + 1
    return rows


def dispatcher(verbs, *, seed: int = 5, scale_format: ScaleFormat | None = None):
    quantize = partial(quantize_groups, scale_format=scale_format) if scale_format else None
    exchange = TokenExchange(
        collectives=verbs,
        group=tuple(range(verbs.world_size)),
        num_local_experts=LOCAL_EXPERTS,
        arrival_seed=seed + verbs.rank,
    )
    messages = DeepEpV2Messages(exchange=exchange, quantize=quantize, capacity=130)
    return DeepEpV2Dispatcher(messages=messages, expert_alignment=128)


def dispatch(verbs, routes: Routes, *, width: int = 4, **options) -> DeepEpV2DispatchOutput:
    mine = routes[verbs.rank]
    weights = torch.arange(1, 1 + 3 * len(mine), dtype=torch.float32).view(-1, 3)
    return dispatcher(verbs, **options).dispatch(
        hidden_of(verbs.rank, len(mine), width),
        PhysicalIds(torch.tensor(mine, dtype=torch.int32).view(-1, 3)),
        weights + 100 * verbs.rank,
    )


def sent(routes: Routes = ROUTES, **options) -> list[DeepEpV2DispatchOutput]:
    return LoopbackWorld(len(routes)).run(lambda verbs: dispatch(verbs, routes, **options))


def sources(output: DeepEpV2DispatchOutput) -> list[tuple[int, int]]:
    """(rank, row) of every received row, in arrival order."""
    handle = output.handle
    return list(zip(handle.source_rank.tolist(), handle.source_row.tolist(), strict=True))


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [(0, 0), (1, 0), (2, 1)]),
        (1, [(0, 1), (1, 0), (2, 1)]),
        (2, [(0, 0), (0, 1), (2, 0), (2, 1)]),
    ],
)
def test_a_token_goes_once_to_every_rank_of_its_experts_and_so_does_a_dummy(rank, expected):
    assert sorted(sources(sent()[rank])) == expected


@pytest.mark.parametrize("rank", range(3))
def test_rows_of_tokens_are_those_that_the_handle_names(rank):
    output = sent()[rank]
    for (source, row), first in zip(
        sources(output), output.hidden_states[:, 0].tolist(), strict=True
    ):
        assert first == (0.0 if source == 1 else 16 * source + row + 1)


@pytest.mark.parametrize(("rank", "ids"), [(0, [0, 1, -1]), (1, [-1, -1, 0])])
def test_a_dummy_asks_for_the_first_slots_of_all_with_zero_weights(rank, ids):
    output = sent()[rank]
    at = sources(output).index((1, 0))
    assert output.topk_ids[at].tolist() == ids
    assert output.topk_weights[at].tolist() == [0.0] * 3


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_a_dummy_is_quantised_as_a_zero_row_is(scale_format):
    output = sent(width=256, scale_format=scale_format)[0]
    at = sources(output).index((1, 0))
    zero = quantize_groups(torch.zeros(1, 256, dtype=torch.bfloat16), scale_format=scale_format)
    assert not output.hidden_states.view(torch.uint8)[at].any()
    assert output.hidden_states_scale[at].tolist() == zero.scale[0].tolist()


def test_an_idle_rank_shows_no_row_of_its_own():
    output = sent(width=256, scale_format=ScaleFormat.UE8M0)[1]
    shapes = [tuple(t.shape) for t in (output.physical_ids, output.wire, output.wire_scale)]
    assert shapes == [(0, 3), (0, 256), (0, 1)]


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ([[[0, 2, -1]], [[2, -1, -1]]], [[128, 128], [128, 128]]),
        ([[[1, 3, 2]] * 129, [[1, -1, -1]]], [[0, 256], [256, 512]]),
        ([[[1, -1, -1]], []], [[128, 256], [128, 128]]),
        ([[[1, -1, -1]] * 128, []], [[128, 384], [128, 128]]),
        ([[], []], [[128, 256], [128, 128]]),
    ],
    ids=["one each", "129", "beside a dummy", "a dummy too many", "dummies alone"],
)
def test_segments_end_where_routes_rounded_up_to_128_say(routes, expected):
    outputs = sent(routes)
    assert [output.psum.tolist() for output in outputs] == expected
    assert outputs[0].psum.dtype == torch.int32


def test_dropped_tokens_are_sent_nowhere_and_no_dummy_stands_in():
    outputs = sent([[[-1, -1, -1]] * 3, [[-1, -1, -1]]])
    assert [output.hidden_states.shape for output in outputs] == [(0, 4)] * 2


def test_more_rows_than_the_buffers_hold_are_refused_with_the_field_that_raises_the_limit():
    with pytest.raises(RankError, match=r"takes 130 rows a rank, rank 1 sends 131: raise moe\.sw"):
        sent([[], [[0, 1, 2]] * 131])


def test_a_full_buffer_is_taken():
    assert sent([[[0, -1, -1]] * 130, []])[0].hidden_states.shape[0] == 130 + 1


def test_an_expert_twice_in_a_tokens_routes_is_refused():
    message = r"token 1 of rank 0 is routed to \[3, 0, 3\], but deepep_v2 wants 3 distinct experts"
    with pytest.raises(RankError, match=message):
        sent([[[0, 1, 2], [3, 0, 3]], []])


def combined(routes: Routes, partial_of, seed: int = 5) -> list[Tensor]:
    """Dispatch, then send back ``partial_of(computing rank, source rank, row)``: first columns."""

    def program(verbs):
        output = dispatch(verbs, routes, seed=seed)
        values = [[partial_of(verbs.rank, *source)] * 4 for source in sources(output)]
        partials = torch.tensor(values, dtype=torch.bfloat16).view(-1, 4)
        here = dispatcher(verbs, seed=seed)
        return here.combine(CombineInput(partial=partials), output.handle).routed

    return LoopbackWorld(len(routes)).run(program)


def test_every_partial_comes_back_to_its_token():
    outputs = combined(ROUTES, lambda here, source, row: 10.0**here * (1 + source + row))
    assert [routed[:, 0].tolist() for routed in outputs] == [[101.0, 220.0], [], [300.0, 444.0]]


def test_what_comes_back_of_a_dummy_is_cut_off():
    routed = combined(ROUTES, lambda *_: float("nan"))[1]
    assert (routed.shape, routed.dtype) == ((0, 4), torch.bfloat16)


@pytest.mark.parametrize(("route", "expected"), [([4, 0, 2], 0.0), ([0, 2, 4], 1.0)], ids=str)
def test_ranks_are_added_in_the_order_of_a_tokens_first_slot_there(route, expected):
    # 2^24 + 1 is 2^24 in fp32; 1 - 2^24 + 2^24 is exact.
    terms = [1.0, -(2.0**24), 2.0**24]
    assert combined([[route], [], []], lambda here, *_: terms[here])[0][0, 0] == expected


def test_the_sum_is_rounded_to_bf16_once():
    # Each 2^-8 alone is a tie that rounds back to 1; together they are one step of bf16.
    terms = [1.0, 2.0**-8, 2.0**-8]
    got = combined([[[0, 2, 4]], [], []], lambda here, *_: terms[here])[0]
    assert got.tolist() == [[1.0078125] * 4]


def test_a_token_without_routes_is_zero():
    assert combined([[[-1] * 3, [0, 2, 3]], []], lambda *_: 1.0)[0][:, 0].tolist() == [0.0, 2.0]


def test_weights_that_nobody_folded_are_refused():
    def program(verbs):
        output = dispatch(verbs, ROUTES)
        unfolded = CombineInput(partial=output.hidden_states, pending_weights=output.topk_weights)
        return dispatcher(verbs).combine(unfolded, output.handle)

    with pytest.raises(RankError, match="weights are folded before this combine"):
        LoopbackWorld(3).run(program)


MANY: Routes = [[[t % 4, 4 + t % 2, -1] for t in range(40)], [], [[0, 4, 2]] * 20]


def test_rows_arrive_in_an_order_that_the_seed_decides():
    first, same, other = ([sources(one) for one in sent(MANY, seed=seed)] for seed in (1, 1, 2))
    assert first == same
    assert first != other


def test_the_order_of_arrival_changes_no_result():
    def partial_of(here: int, source: int, row: int) -> float:
        return 1 + here / 3 + source / 7 + row / 11

    first, second = (combined(MANY, partial_of, seed=seed) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

"""Received rows into expert segments and back."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.dispatched import DeepEpNormalDispatchOutput, DispatchHandle
from moe.formats import DispatchFormat, GemmLayout, RunnerBackend
from moe.indices import scatter_index
from moe.permute import PERMUTES, PermuteContext, UnsupportedPermuteError, permute_pair
from moe.permute.deepep_normal import post_permute, pre_permute
from moe.quant.fp8 import QuantizedRows
from moe.quant.ue8m0 import mn_major
from moe.stages import Gemm2Output, PrePermuteOutput

# Five received rows of a rank with three experts: segments of 128, 0 and 256 rows.
LOCAL_IDS = [[0, 2], [-1, 2], [2, -1], [-1, -1], [2, 0]]
COUNTS = [128, 0, 256]
PADDING = [row for row in range(384) if row not in (0, 1, 128, 129, 130, 131)]
CONTEXT = PermuteContext(
    num_local_experts=3,
    num_experts=3,
    layout=GemmLayout.CONTIG,
    row_alignment=128,
    routed_scaling_factor=2.5,
    quantize=None,
)


def received(
    ids: list[list[int]],
    counts: list[int],
    *,
    hidden: Tensor | None = None,
    scale: Tensor | None = None,
    weights: Tensor | None = None,
) -> DeepEpNormalDispatchOutput:
    """A dispatch output with these local ids; row r of ``hidden`` is r + 1, -(r + 1)."""
    rows = len(ids)
    if hidden is None:
        numbers = torch.arange(1, rows + 1, dtype=torch.bfloat16)
        hidden = torch.stack([numbers, -numbers], dim=1)
    topk_ids = torch.tensor(ids, dtype=torch.int64).view(rows, 2)
    nothing = torch.zeros(0, dtype=torch.int64)
    return DeepEpNormalDispatchOutput(
        physical_ids=topk_ids,
        wire=hidden,
        wire_scale=scale,
        hidden_states=hidden,
        hidden_states_scale=scale,
        topk_ids=topk_ids,
        topk_weights=torch.ones(rows, 2) if weights is None else weights,
        num_recv_tokens_per_expert=torch.tensor(counts),
        handle=DispatchHandle(
            num_tokens=rows,
            source_rank=nothing,
            source_row=nothing,
            sent_row=nothing,
            send_counts=nothing,
            recv_counts=nothing,
        ),
    )


def permuted(**tensors: Tensor) -> PrePermuteOutput:
    return pre_permute(received(LOCAL_IDS, COUNTS, **tensors), CONTEXT)


@pytest.mark.parametrize("seed", range(4))
def test_a_route_gets_a_row_of_its_experts_segment_in_whatever_order(seed):
    context = replace(CONTEXT, slot_order_seed=seed)
    index = pre_permute(received(LOCAL_IDS, COUNTS), context).restore.output_index
    starts = torch.tensor([0, 128, 128])
    ids = torch.tensor(LOCAL_IDS)
    for expert, routes in ((0, 2), (2, 4)):
        rows = index[ids == expert] - starts[expert]
        assert sorted(rows.tolist()) == list(range(routes))


def test_every_route_gets_a_row_of_its_own():
    index = permuted().restore.output_index
    assert sorted(index[index >= 0].tolist()) == [0, 1, 128, 129, 130, 131]


def test_a_slot_has_no_row_exactly_where_it_is_no_route():
    index = permuted().restore.output_index
    assert ((index < 0) == (torch.tensor(LOCAL_IDS) < 0)).all()


def test_row_numbers_are_int64():
    assert permuted().restore.output_index.dtype == torch.int64


def test_an_id_past_the_last_expert_is_no_route():
    index = scatter_index(torch.tensor([[3, 2], [0, 7]]), torch.tensor([128, 0, 128]), seed=0)
    assert index.tolist() == [[-1, 128], [0, -1]]


def test_each_route_has_its_row_copied():
    rows = permuted().rows.hidden_states
    token, slot = (permuted().restore.output_index >= 0).nonzero(as_tuple=True)
    places = permuted().restore.output_index[token, slot]
    assert rows[places, 0].tolist() == (token + 1).tolist()


def test_segments_are_as_long_as_announced_and_padding_carries_the_expert():
    assert permuted().rows.m_indices.tolist() == [0] * 128 + [2] * 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
def test_padding_rows_are_poisoned(dtype):
    rows = permuted(hidden=torch.ones(5, 4).to(dtype)).rows.hidden_states
    assert bool(rows[PADDING].to(torch.float32).isnan().all())


def test_rows_of_routes_are_not_poisoned():
    rows = permuted().rows.hidden_states[[0, 1, 128, 129, 130, 131]]
    assert not bool(rows.isnan().any())


@pytest.mark.parametrize("width", [1, 3])
def test_packed_scales_move_with_their_rows(width):
    words = torch.arange(5 * width, dtype=torch.int32).view(5, width) + 7
    scale = permuted(scale=mn_major(words)).rows.hidden_states_scale
    for source, slots in enumerate(permuted().restore.output_index.tolist()):
        for row in slots:
            if row >= 0:
                assert scale[row].tolist() == words[source].tolist()


@pytest.mark.parametrize("width", [1, 3])
def test_packed_scales_stay_mn_major(width):
    words = mn_major(torch.ones(5, width, dtype=torch.int32))
    scale = permuted(scale=words).rows.hidden_states_scale
    assert (scale.shape, scale.stride()) == ((384, width), (1, 384))


def test_packed_scales_of_padding_are_zero():
    scale = permuted(scale=mn_major(torch.ones(5, 2, dtype=torch.int32))).rows.hidden_states_scale
    assert scale[PADDING].eq(0).all()


def test_fp32_scales_move_with_their_rows_and_are_poison_in_padding():
    moved = permuted(scale=torch.arange(1.0, 6.0)[:, None])
    scale, index = moved.rows.hidden_states_scale, moved.restore.output_index
    token, slot = (index >= 0).nonzero(as_tuple=True)
    assert scale[index[token, slot], 0].tolist() == (token + 1).tolist()
    assert bool(scale[PADDING].isnan().all())


def test_bf16_rows_have_no_scale():
    assert permuted().rows.hidden_states_scale is None


def quantising(rows: Tensor) -> QuantizedRows:
    """Halved, and the row's number as scale."""
    return QuantizedRows(values=rows / 2, scale=torch.arange(1.0, len(rows) + 1)[:, None])


def test_rows_of_a_bf16_wire_are_quantised_once_each():
    calls = []

    def counted(rows: Tensor) -> QuantizedRows:
        calls.append(len(rows))
        return quantising(rows)

    context = replace(CONTEXT, quantize=counted)
    sent = pre_permute(received(LOCAL_IDS, COUNTS), context)
    assert calls == [5]
    token, slot = (sent.restore.output_index >= 0).nonzero(as_tuple=True)
    places = sent.restore.output_index[token, slot]
    assert sent.rows.hidden_states[places, 0].tolist() == ((token + 1) / 2).tolist()
    assert sent.rows.hidden_states_scale[places, 0].tolist() == (token + 1).tolist()


def test_codes_are_not_quantised_a_second_time():
    context = replace(CONTEXT, quantize=quantising)
    with pytest.raises(AssertionError, match="quantised already"):
        pre_permute(received(LOCAL_IDS, COUNTS, scale=torch.ones(5, 1)), context)


def test_no_received_row_makes_no_grouped_row():
    empty = pre_permute(received([], [0, 0, 0], hidden=torch.zeros(0, 2).bfloat16()), CONTEXT)
    assert empty.rows.hidden_states.shape == (0, 2)
    assert empty.rows.m_indices.tolist() == []


def test_no_grouped_row_restores_to_no_partial():
    empty = pre_permute(received([], [0, 0], hidden=torch.zeros(0, 2).bfloat16()), CONTEXT)
    back = post_permute(Gemm2Output(output=torch.zeros(0, 2).bfloat16()), empty.restore, CONTEXT)
    assert (back.partial.shape, back.partial.dtype) == ((0, 2), torch.bfloat16)


def test_rows_without_a_route_restore_to_zero_even_without_grouped_rows():
    sent = pre_permute(received([[-1, -1]], [0]), CONTEXT)
    back = post_permute(Gemm2Output(output=torch.zeros(0, 2).bfloat16()), sent.restore, CONTEXT)
    assert back.partial.tolist() == [[0.0, 0.0]]


def test_identity_experts_give_back_each_token_times_its_weights():
    weights = torch.tensor([[0.5, 0.25], [9.0, 2.0], [0.5, 9.0], [9.0, 9.0], [1.0, 3.0]])
    sent = permuted(weights=weights)
    back = post_permute(Gemm2Output(output=sent.rows.hidden_states), sent.restore, CONTEXT)
    assert back.partial[:, 0].tolist() == [0.75, 4.0, 1.5, 0.0, 20.0]


def test_the_scaling_factor_is_left_to_the_tail():
    sent = permuted()
    output = Gemm2Output(output=sent.rows.hidden_states)
    factor_of_one = replace(CONTEXT, routed_scaling_factor=1.0)
    partials = [post_permute(output, sent.restore, c).partial for c in (CONTEXT, factor_of_one)]
    assert torch.equal(*partials)


def test_weights_are_folded_when_partials_leave():
    sent = permuted()
    back = post_permute(Gemm2Output(output=sent.rows.hidden_states), sent.restore, CONTEXT)
    assert back.pending_weights is None


def test_the_given_rows_are_not_written_into():
    hidden = torch.ones(5, 4, dtype=torch.bfloat16)
    permuted(hidden=hidden)
    assert hidden._version == 0


def test_the_registered_pair_holds_both_directions():
    pair = permute_pair(DispatchFormat.DEEPEP_NORMAL, RunnerBackend.DEEP_GEMM)
    assert (pair.pre, pair.post) == (pre_permute, post_permute)


def test_an_unregistered_pair_is_refused_with_those_there_are(monkeypatch):
    pair = (DispatchFormat.DEEPEP_NORMAL, RunnerBackend.DEEP_GEMM)
    monkeypatch.setattr("moe.permute.PERMUTES", {pair: PERMUTES[pair]})
    with pytest.raises(UnsupportedPermuteError, match=r"nixl.*; registered: deepep_normal\+deep_"):
        permute_pair(DispatchFormat.NIXL, RunnerBackend.DEEP_GEMM)


@pytest.mark.parametrize("with_scale", [False, True], ids=["bf16", "fp32 scales"])
def test_padding_is_zero_in_deterministic_inference_whatever_the_recipe(with_scale):
    scale = torch.ones(5, 1) if with_scale else None
    context = replace(CONTEXT, zeroes_padding=True)
    rows = pre_permute(received(LOCAL_IDS, COUNTS, scale=scale), context).rows
    assert not bool(rows.hidden_states[PADDING].any())
    assert not bool(rows.hidden_states.isnan().any())
    assert not with_scale or not bool(rows.hidden_states_scale[PADDING].any())

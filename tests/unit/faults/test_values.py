"""Value faults: each changes what it says, and nothing else of the stage's value."""

from dataclasses import replace

import pytest
import torch

from moe.faults.kinds import FaultContext
from moe.faults.values import (
    count_off_by_one,
    gate_up_swapped,
    local_ids_left_global,
    padding_row_counted,
    scale_rounded_down,
    shared_expert_per_rank,
    tokens_swapped,
    topk_weights_twice,
    weights_from_biased_scores,
)
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from moe.stages import (
    ActivationOutput,
    CombineInput,
    ContigInput,
    DeepEpNormalDispatchOutput,
    DispatchHandle,
    Gemm2Output,
    PrePermuteOutput,
    Restore,
    SharedExpertOutput,
    TailOutput,
    TopKOutput,
)
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights


def context(seen=None, rank=1, num_ranks=4, **params):
    return FaultContext(rank=rank, num_ranks=num_ranks, params=params, seen=seen or {})


def layer_weights(values, scale=None, bias=None):
    matrix = ExpertMatrix(values=values, scale=scale)
    return LayerWeights(
        expert_ids=torch.tensor([0]),
        experts=ExpertWeights(w13=matrix, w2=matrix),
        shared=None,
        gate_weight=torch.zeros(1, 1),
        correction_bias=bias,
    )


def test_gate_and_up_rows_change_places():
    weights = layer_weights(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]))
    swapped = gate_up_swapped(weights, context())
    assert swapped.experts.w13.values.flatten().tolist() == [3.0, 4.0, 1.0, 2.0]
    assert swapped.experts.w2 is weights.experts.w2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=["fp32 blocks", "packed rows"])
def test_scales_follow_their_rows(dtype):
    values = torch.zeros(1, 4, 1).to(torch.float8_e4m3fn)
    scale = torch.tensor([[[1], [2], [3], [4]]], dtype=dtype)
    scale = mn_major(scale) if dtype == torch.int32 else scale
    swapped = gate_up_swapped(layer_weights(values, scale), context()).experts.w13.scale
    assert swapped.flatten().tolist() == [3, 4, 1, 2]
    assert swapped.stride() == scale.stride()


ROUTED = TopKOutput(
    logits=torch.tensor([[0.0, 0.0, 9.0]]),
    topk_ids=torch.tensor([[0, 1]], dtype=torch.int32),
    topk_weights=torch.tensor([[0.5, 0.5]]),
)


def test_biased_weights_still_add_up_to_one():
    score = torch.log(torch.tensor(2.0)).sqrt()
    seen = {Stage.WEIGHTS: layer_weights(torch.zeros(1, 2, 1), bias=torch.tensor([score, 0, 0]))}
    weights = weights_from_biased_scores(ROUTED, context(seen)).topk_weights
    assert weights.tolist() == [[pytest.approx(2 / 3), pytest.approx(1 / 3)]]


def test_without_a_bias_the_weights_stay():
    seen = {Stage.WEIGHTS: layer_weights(torch.zeros(1, 2, 1))}
    assert weights_from_biased_scores(ROUTED, context(seen)) is ROUTED


def dispatched(rows=3, scale=None):
    none = torch.zeros(0, dtype=torch.int64)
    return DeepEpNormalDispatchOutput(
        wire=torch.zeros(0, 2),
        wire_scale=None,
        hidden_states=torch.arange(2.0 * rows).view(rows, 2),
        hidden_states_scale=scale,
        topk_ids=torch.tensor([[0, -1], [1, 0], [-1, 1]])[:rows],
        topk_weights=torch.ones(rows, 2),
        num_recv_tokens_per_expert=torch.tensor([128, 128]),
        handle=DispatchHandle(
            num_tokens=0,
            source_rank=none,
            source_row=none,
            sent_row=none,
            send_counts=none,
            recv_counts=none,
        ),
    )


@pytest.mark.parametrize(("row", "order"), [(0, [1, 0, 2]), (2, [2, 1, 0]), (4, [0, 2, 1])])
def test_two_neighbouring_tokens_change_places_with_their_scales(row, order):
    sent = dispatched(scale=torch.tensor([[1.0], [2.0], [3.0]]))
    swapped = tokens_swapped(sent, context(row=row))
    assert torch.equal(swapped.hidden_states, sent.hidden_states[order])
    assert torch.equal(swapped.hidden_states_scale, sent.hidden_states_scale[order])
    assert swapped.topk_ids is sent.topk_ids


def test_packed_scales_stay_mn_major_when_tokens_change_places():
    packed = mn_major(torch.tensor([[1], [2], [3]], dtype=torch.int32))
    swapped = tokens_swapped(dispatched(scale=packed), context(row=0)).hidden_states_scale
    assert (swapped.flatten().tolist(), swapped.stride()) == ([2, 1, 3], (1, 4))


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_than_two_tokens_cannot_change_places(rows):
    sent = dispatched(rows=rows)
    assert tokens_swapped(sent, context(row=0)) is sent


def test_ids_left_global_start_at_the_ranks_first_expert():
    sent = local_ids_left_global(dispatched(), context(rank=3))
    assert sent.topk_ids.tolist() == [[6, -1], [7, 6], [-1, 7]]


@pytest.mark.parametrize(("expert", "counts"), [(0, [129, 128]), (1, [128, 129]), (2, [129, 128])])
def test_one_count_is_one_too_large(expert, counts):
    sent = dispatched()
    assert (
        count_off_by_one(sent, context(expert=expert)).num_recv_tokens_per_expert.tolist() == counts
    )
    assert sent.num_recv_tokens_per_expert.tolist() == [128, 128]


def permuted():
    return PrePermuteOutput(
        rows=ContigInput(
            hidden_states=torch.zeros(4, 1),
            hidden_states_scale=None,
            m_indices=torch.tensor([0, 0, 1, 1], dtype=torch.int32),
            live_rows=torch.tensor([0, 2]),
        ),
        restore=Restore(
            topk_ids=torch.tensor([[0, -1], [1, -1]]),
            topk_weights=torch.tensor([[0.5, 0.0], [0.25, 0.0]]),
            output_index=torch.tensor([[0, -1], [2, -1]]),
        ),
    )


@pytest.mark.parametrize(("row", "ids"), [(0, [[0, 0], [1, -1]]), (1, [[0, -1], [1, 0]])])
def test_a_slot_without_a_route_reads_the_first_padding_row(row, ids):
    restore = padding_row_counted(permuted(), context(row=row)).restore
    assert restore.topk_ids.tolist() == ids
    assert restore.output_index[row].tolist() == [[0, 2][row], 1]


def test_without_a_free_slot_no_padding_row_can_be_counted():
    full = permuted()
    ids = torch.zeros_like(full.restore.topk_ids)
    full = replace(full, restore=replace(full.restore, topk_ids=ids))
    assert padding_row_counted(full, context(row=0)) is full


def activated(scale):
    rows = torch.zeros(4, 1)
    return ActivationOutput(activation=rows, hidden_states=rows, hidden_states_scale=scale)


SEEN = {Stage.PRE_PERMUTE: permuted(), Stage.GEMM2: Gemm2Output(output=torch.tensor([[8.0]] * 4))}


@pytest.mark.parametrize(("row", "at"), [(0, 0), (1, 2), (2, 0)])
def test_an_fp32_scale_of_a_live_row_is_an_eighth_smaller(row, at):
    scale = torch.ones(4, 1)
    wrong = scale_rounded_down(activated(scale), context(SEEN, row=row)).hidden_states_scale
    assert wrong.flatten().tolist() == [0.875 if i == at else 1.0 for i in range(4)]
    assert scale.eq(1).all()


def test_packed_scales_of_a_live_row_are_halved_and_absent_groups_stay_zero():
    packed = mn_major(torch.full((4, 1), 127 | 130 << 8, dtype=torch.int32))
    wrong = scale_rounded_down(activated(packed), context(SEEN, row=1)).hidden_states_scale
    assert wrong.flatten().tolist() == [127 | 130 << 8] * 2 + [126 | 129 << 8, 127 | 130 << 8]
    assert wrong.stride() == (1, 4)


def test_without_scales_nothing_can_be_rounded_down():
    middle = activated(None)
    assert scale_rounded_down(middle, context(SEEN, row=0)) is middle


def test_weights_folded_twice_are_squared():
    partials = topk_weights_twice(CombineInput(partial=torch.zeros(2, 1)), context(SEEN)).partial
    assert partials.flatten().tolist() == [8 * 0.25, 8 * 0.0625]


def test_the_shared_expert_is_added_once_for_every_other_rank():
    rows = torch.ones(1, 1, dtype=torch.bfloat16)
    shared = SharedExpertOutput(
        input=rows,
        input_scale=None,
        gate_up=rows,
        activation=rows,
        hidden_states=rows,
        hidden_states_scale=None,
        output=3 * rows,
    )
    finished = shared_expert_per_rank(TailOutput(shared=shared, output=5 * rows), context())
    assert finished.output.tolist() == [[5 + 3 * 3]]


def test_without_a_shared_expert_the_tail_stays():
    finished = TailOutput(shared=None, output=torch.ones(1, 1))
    assert shared_expert_per_rank(finished, context()) is finished

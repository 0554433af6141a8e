"""All tokens into the grouped rows of the local experts and back, in both layouts."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from moe.dispatched import StandardDispatchOutput
from moe.formats import DispatchFormat, GemmLayout, RunnerBackend, ScaleFormat
from moe.permute import PermuteContext, permute_pair
from moe.permute.standard import post_permute, pre_permute
from moe.quant.fp8 import QuantizedRows, quantize_groups
from moe.stages import Gemm2Output, PrePermuteOutput

# Five tokens on a rank with three of six experts. Ten slots in segments of 4 rows take at most
# 4 * (3 + 7 // 4) = 16 rows: expert 0 has three, expert 1 none, expert 2 four and the slack.
LOCAL_IDS = [[0, 2], [-1, 2], [2, 0], [-1, -1], [2, 0]]
M_INDICES = [0, 0, 0, -1] + [2] * 4 + [-1] * 8
WEIGHTS = torch.tensor([[0.5, 0.25], [9.0, 2.0], [0.5, 1.0], [9.0, 9.0], [1.0, 3.0]])
CONTIG = PermuteContext(
    num_local_experts=3,
    num_experts=6,
    layout=GemmLayout.CONTIG,
    row_alignment=4,
    routed_scaling_factor=1.0,
    quantize=None,
)
MASKED = replace(CONTIG, layout=GemmLayout.MASKED)
LAYOUTS = pytest.mark.parametrize("context", [CONTIG, MASKED], ids=["contig", "masked"])


def sent(ids: list[list[int]], width: int = 2) -> StandardDispatchOutput:
    """Tokens with these local ids; row t of ``hidden_states`` is t + 1."""
    topk_ids = torch.tensor(ids, dtype=torch.int32).view(len(ids), 2)
    rows = torch.arange(1, len(ids) + 1, dtype=torch.bfloat16)[:, None].repeat(1, width)
    return StandardDispatchOutput(
        physical_ids=topk_ids,
        hidden_states=rows,
        topk_ids=topk_ids,
        topk_weights=WEIGHTS[: len(ids)],
    )


def flat(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2)


def quantized(context: PermuteContext, scale_format: ScaleFormat) -> PrePermuteOutput:
    quantize = partial(quantize_groups, scale_format=scale_format)
    return pre_permute(sent(LOCAL_IDS, width=256), replace(context, quantize=quantize))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("context", "starts"), [(CONTIG, (0, 4)), (MASKED, (0, 512))], ids=["contig", "masked"]
)
def test_a_route_gets_a_row_of_its_expert_in_whatever_order(context, starts, seed):
    # A slab has 256 rows, so expert 2 begins at row 512.
    context = replace(context, slot_order_seed=seed)
    index = pre_permute(sent(LOCAL_IDS), context).restore.output_index
    assert index.dtype == torch.int32
    for expert, start, routes in ((0, starts[0], 3), (2, starts[1], 4)):
        rows = index[torch.tensor(LOCAL_IDS) == expert] - start
        assert sorted(rows.tolist()) == list(range(routes))


@LAYOUTS
def test_each_route_has_its_row_copied_and_the_rest_is_poison(context):
    permuted = pre_permute(sent(LOCAL_IDS), context)
    rows, index = flat(permuted.rows.hidden_states), permuted.restore.output_index
    token, slot = (index >= 0).nonzero(as_tuple=True)
    taken = index[token, slot].long()
    assert rows[taken, 0].tolist() == [1, 1, 2, 3, 3, 5, 5]
    others = torch.ones(len(rows), dtype=torch.bool).index_fill_(0, taken, False)
    assert bool(rows[others].isnan().all())


def test_segments_fill_the_bound_and_their_padding_has_no_expert():
    rows = pre_permute(sent(LOCAL_IDS), CONTIG).rows
    assert (rows.m_indices.tolist(), rows.m_indices.dtype) == (M_INDICES, torch.int32)
    assert rows.hidden_states.shape == (16, 2)


def test_the_live_rows_of_segments_are_those_with_an_expert():
    assert pre_permute(sent(LOCAL_IDS), CONTIG).rows.live_rows.tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_a_slab_says_how_many_rows_are_real():
    rows = pre_permute(sent(LOCAL_IDS), MASKED).rows
    assert (rows.masked_m.tolist(), rows.masked_m.dtype) == ([3, 0, 4], torch.int32)
    assert rows.hidden_states.shape == (3, 256, 2)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "expected"), [(5, 6, 2), (5, 10, 1), (0, 6, 1), (4, 3, 3)]
)
def test_the_hint_is_the_mean_load_of_an_expert_of_all_ranks(num_tokens, num_experts, expected):
    context = replace(MASKED, num_experts=num_experts)
    assert pre_permute(sent([[0, 1]] * num_tokens), context).rows.expected_m == expected


@LAYOUTS
def test_an_id_past_the_last_expert_is_no_route(context):
    index = pre_permute(sent([[3, 2], [0, 7]]), context).restore.output_index
    assert (index >= 0).tolist() == [[False, True], [True, False]]


@LAYOUTS
def test_an_id_past_the_last_expert_adds_nothing(context):
    permuted = pre_permute(sent([[3, 2], [0, 7]]), context)
    output = Gemm2Output(output=permuted.rows.hidden_states)
    back = post_permute(output, permuted.restore, context).partial
    assert back[:, 0].tolist() == [0.25, 18.0]


@LAYOUTS
@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_codes_and_scales_of_a_route_are_those_of_its_token(context, scale_format):
    permuted = quantized(context, scale_format)
    whole = quantize_groups(sent(LOCAL_IDS, width=256).hidden_states, scale_format)
    codes, scale = flat(permuted.rows.hidden_states), flat(permuted.rows.hidden_states_scale)
    assert codes.dtype == torch.float8_e4m3fn
    for token, places in enumerate(permuted.restore.output_index.tolist()):
        for place in (place for place in places if place >= 0):
            assert codes[place].float().tolist() == whole.values[token].float().tolist()
            assert scale[place].tolist() == whole.scale[token].tolist()


@pytest.mark.parametrize(
    ("context", "scale_format", "shape", "stride"),
    [
        (CONTIG, ScaleFormat.FP32, (16, 2), (2, 1)),
        (CONTIG, ScaleFormat.UE8M0, (16, 1), (1, 16)),
        (MASKED, ScaleFormat.FP32, (3, 256, 2), (512, 2, 1)),
        (MASKED, ScaleFormat.UE8M0, (3, 256, 1), (256, 1, 256)),
    ],
    ids=["contig-fp32", "contig-ue8m0", "masked-fp32", "masked-ue8m0"],
)
def test_scales_lie_as_the_gemm_reads_them(context, scale_format, shape, stride):
    scale = quantized(context, scale_format).rows.hidden_states_scale
    assert (scale.shape, scale.stride()) == (shape, stride)


@LAYOUTS
def test_every_token_is_quantised_once(context):
    calls = []

    def counting(rows: Tensor) -> QuantizedRows:
        calls.append(rows.shape[0])
        return quantize_groups(rows, ScaleFormat.FP32)

    pre_permute(sent(LOCAL_IDS, width=128), replace(context, quantize=counting))
    assert calls == [5]


@LAYOUTS
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_identity_experts_give_back_each_token_times_its_weights_and_the_factor(context, factor):
    context = replace(context, routed_scaling_factor=factor)
    permuted = pre_permute(sent(LOCAL_IDS), context)
    output = Gemm2Output(output=permuted.rows.hidden_states)
    partial_sums = post_permute(output, permuted.restore, context).partial
    expected = [factor * value for value in (0.75, 4.0, 4.5, 0.0, 20.0)]
    assert partial_sums[:, 0].tolist() == expected


def test_the_factor_is_part_of_the_one_rounding():
    # 1 + 2^-8 alone is a tie that goes to 1; three times it is nearest to 3.015625 in bf16.
    context = replace(CONTIG, routed_scaling_factor=3.0)
    permuted = pre_permute(sent([[0, 1]]), context)
    weights = torch.tensor([[1.0, 2.0**-8]])
    restore = replace(permuted.restore, topk_weights=weights)
    output = Gemm2Output(output=permuted.rows.hidden_states)
    assert post_permute(output, restore, context).partial.tolist() == [[3.015625] * 2]


@LAYOUTS
def test_weights_and_factor_are_folded_when_partials_leave(context):
    permuted = pre_permute(sent(LOCAL_IDS), context)
    output = Gemm2Output(output=permuted.rows.hidden_states)
    assert post_permute(output, permuted.restore, context).pending_weights is None


@LAYOUTS
@pytest.mark.parametrize("ids", [[], [[-1, -1], [-1, -1]]], ids=["no_token", "no_local_route"])
def test_nothing_to_compute_restores_to_zero(context, ids):
    permuted = pre_permute(sent(ids), context)
    output = Gemm2Output(output=permuted.rows.hidden_states)
    back = post_permute(output, permuted.restore, context).partial
    assert (back.tolist(), back.dtype) == ([[0.0, 0.0]] * len(ids), torch.bfloat16)


@LAYOUTS
def test_the_given_rows_are_not_written_into(context):
    given = sent(LOCAL_IDS)
    pre_permute(given, context)
    assert (given.hidden_states._version, given.topk_ids._version) == (0, 0)


@pytest.mark.parametrize(
    ("ids", "height"),
    [([[0, 1]] * 300, 512), ([[0, -1], [-1, 1]] * 150, 256), ([[0, 2]] * 256, 256), ([], 256)],
    ids=["300 of 300", "150 of 300", "256 of 256", "no token"],
)
def test_capped_slabs_are_as_high_as_the_fullest_expert_needs(ids, height):
    """Without the cap 300 and 256 tokens have slabs of 512."""
    rows = pre_permute(sent(ids), replace(MASKED, caps_slabs=True)).rows
    assert rows.hidden_states.shape[1] == height


def test_a_cap_moves_no_row_out_of_its_slab():
    context = replace(MASKED, caps_slabs=True)
    permuted = pre_permute(sent([[0, 2]] * 256), context)
    output = Gemm2Output(output=permuted.rows.hidden_states)
    restore = replace(permuted.restore, topk_weights=torch.ones(256, 2))
    back = post_permute(output, restore, context).partial
    assert torch.equal(back, 2 * sent([[0, 2]] * 256).hidden_states)


DETERMINISTIC = replace(CONTIG, zeroes_padding=True)


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_zeroed_padding_is_zero_in_codes_and_scales(scale_format):
    rows = quantized(DETERMINISTIC, scale_format).rows
    padding = torch.tensor(M_INDICES) < 0
    assert not bool(rows.hidden_states.view(torch.uint8)[padding].any())
    assert not bool(rows.hidden_states_scale[padding].any())


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_zeroed_padding_changes_no_other_row(scale_format):
    zeroed, poisoned = (quantized(c, scale_format).rows for c in (DETERMINISTIC, CONTIG))
    live = torch.tensor(M_INDICES) >= 0
    codes = [rows.hidden_states.view(torch.uint8)[live] for rows in (zeroed, poisoned)]
    scales = [rows.hidden_states_scale[live] for rows in (zeroed, poisoned)]
    assert torch.equal(*codes)
    assert torch.equal(*scales)


@pytest.mark.parametrize(
    "context",
    [DETERMINISTIC, replace(DETERMINISTIC, wide_segments=True)],
    ids=["bf16", "bf16 in wide segments"],
)
def test_padding_of_bf16_rows_is_never_zeroed(context):
    rows = pre_permute(sent(LOCAL_IDS), context).rows
    assert bool(rows.hidden_states[rows.m_indices < 0].isnan().all())


WIDE = replace(CONTIG, wide_segments=True)


def test_wide_segments_have_a_block_to_spare_for_every_expert():
    """Ten slots are three blocks of 4, and three experts have one more each."""
    rows = pre_permute(sent(LOCAL_IDS), WIDE).rows
    assert rows.m_indices.tolist() == [0, 0, 0, -1] + [2] * 4 + [-1] * 16


def test_wide_segments_zero_no_padding():
    rows = quantized(replace(WIDE, zeroes_padding=True), ScaleFormat.FP32).rows
    assert bool(rows.hidden_states_scale[rows.m_indices < 0].isnan().all())


@pytest.mark.parametrize(
    ("context", "value"), [(CONTIG, 3.015625), (WIDE, 3.0)], ids=["compact", "wide"]
)
def test_behind_wide_segments_the_sum_is_stored_before_the_factor_acts(context, value):
    # 1 + 2^-8 is a tie that is stored as 1; three times it is nearest to 3.015625.
    context = replace(context, routed_scaling_factor=3.0)
    permuted = pre_permute(sent([[0, 1]]), context)
    restore = replace(permuted.restore, topk_weights=torch.tensor([[1.0, 2.0**-8]]))
    output = Gemm2Output(output=permuted.rows.hidden_states)
    assert post_permute(output, restore, context).partial.tolist() == [[value] * 2]


def test_the_product_with_the_factor_is_stored_again():
    # 1.0078125 * 1.5 is 1.51171875, a tie between steps of 2^-7, which goes to 1.515625.
    context = replace(WIDE, routed_scaling_factor=1.5)
    permuted = pre_permute(sent([[0, -1]]), context)
    restore = replace(permuted.restore, topk_weights=torch.tensor([[1.0078125, 0.0]]))
    output = Gemm2Output(output=permuted.rows.hidden_states)
    assert post_permute(output, restore, context).partial.tolist() == [[1.515625] * 2]


def test_the_registered_pair_holds_both_directions():
    pair = permute_pair(DispatchFormat.STANDARD, RunnerBackend.DEEP_GEMM)
    assert (pair.pre, pair.post) == (pre_permute, post_permute)

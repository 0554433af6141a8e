"""Received tokens into segments, expanded rows into slabs or left in place, and the ways back."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.dispatched import (
    DeepEpV2DispatchOutput,
    DeepEpV2ExpandedDispatchOutput,
    DeepEpV2Handle,
    ExpandedHandle,
)
from moe.formats import DispatchFormat, GemmLayout, RunnerBackend
from moe.permute import PermuteContext, permute_pair
from moe.permute.deepep_v2 import (
    SlabOverflowError,
    ep_expand_init_m_indices_from_psum,
    ep_scatter_from_psum,
    expand_to_masked_slab,
    masked_slab_to_expand,
    post_permute,
    pre_permute,
)
from moe.quant.ue8m0 import mn_major
from moe.stages import Gemm2Output

ALIGNMENT = 4
CONTIG = PermuteContext(
    num_local_experts=3,
    num_experts=6,
    layout=GemmLayout.CONTIG,
    row_alignment=ALIGNMENT,
    routed_scaling_factor=2.5,
    quantize=None,
)
MASKED = replace(CONTIG, layout=GemmLayout.MASKED)
NOTHING = torch.zeros(0, dtype=torch.int64)
HANDLE = DeepEpV2Handle(
    num_tokens=0,
    source_rank=NOTHING,
    source_row=NOTHING,
    sent_row=NOTHING,
    send_counts=NOTHING,
    recv_counts=NOTHING,
    first_slot=NOTHING,
)

# Five received tokens on a rank with three experts: segments of 4, 0 and 8 rows, one row too long.
LOCAL_IDS = torch.tensor([[0, 2], [-1, 2], [2, 2], [-1, -1], [2, 0]])
TOKEN_PSUM = torch.tensor([4, 4, 12], dtype=torch.int32)


def tokens(weights: Tensor | None = None) -> DeepEpV2DispatchOutput:
    """Row r is r + 1."""
    hidden = torch.arange(1, 6, dtype=torch.bfloat16)[:, None].expand(5, 2).contiguous()
    return DeepEpV2DispatchOutput(
        physical_ids=LOCAL_IDS,
        wire=hidden,
        wire_scale=None,
        hidden_states=hidden,
        hidden_states_scale=None,
        topk_ids=LOCAL_IDS,
        topk_weights=torch.ones(5, 2) if weights is None else weights,
        psum=TOKEN_PSUM,
        handle=HANDLE,
    )


# Expanded: three rows of expert 0 from row 0, none of expert 1, five of expert 2 from row 4.
PSUM = torch.tensor([3, 4, 9], dtype=torch.int32)
REAL = [0, 1, 2, 4, 5, 6, 7, 8]
FREE = [row for row in range(16) if row not in REAL]


def expanded(
    *, psum: Tensor = PSUM, scale: Tensor | None = None, height: int = 8
) -> DeepEpV2ExpandedDispatchOutput:
    """A buffer of 16 rows; row c is c + 1, rows of no route are NaN, weights are 1 + c / 64."""
    hidden = torch.arange(1, 17, dtype=torch.bfloat16)[:, None].repeat(1, 2)
    hidden[FREE] = torch.nan
    return DeepEpV2ExpandedDispatchOutput(
        physical_ids=LOCAL_IDS,
        wire=hidden,
        wire_scale=None,
        hidden_states=hidden,
        hidden_states_scale=scale,
        topk_weights=1 + torch.arange(16) / 64,
        psum=psum,
        masked_max_m=height,
        expected_m=1,
        handle=ExpandedHandle(
            source_rank=NOTHING,
            source_row=NOTHING,
            source_slot=NOTHING,
            message=NOTHING,
            messages=HANDLE,
        ),
    )


# Tokens to segments.


def test_a_segment_ends_where_psum_says_and_its_padding_carries_the_expert():
    assert pre_permute(tokens(), CONTIG).rows.m_indices.tolist() == [0] * 4 + [2] * 8


@pytest.mark.parametrize("seed", range(4))
def test_a_route_gets_a_row_of_its_experts_segment_in_whatever_order(seed):
    context = replace(CONTIG, slot_order_seed=seed)
    index = pre_permute(tokens(), context).restore.output_index
    assert index.dtype == torch.int64
    assert sorted(index[LOCAL_IDS == 0].tolist()) == [0, 1]
    assert sorted(index[LOCAL_IDS == 2].tolist()) == [4, 5, 6, 7, 8]
    assert index[LOCAL_IDS < 0].tolist() == [-1] * 3


def test_an_id_past_the_last_expert_is_no_route():
    hidden = torch.zeros(1, 2, dtype=torch.bfloat16)
    _, index = ep_scatter_from_psum(hidden, None, torch.tensor([[3, 2]]), TOKEN_PSUM, CONTIG)
    assert index.tolist() == [[-1, 4]]


def test_rows_of_routes_are_copies_and_padding_is_poison():
    permuted = pre_permute(tokens(), CONTIG)
    received, slot = (LOCAL_IDS >= 0).nonzero(as_tuple=True)
    rows, places = permuted.rows.hidden_states, permuted.restore.output_index[received, slot]
    assert rows[places, 0].tolist() == (received + 1).tolist()
    assert rows[[2, 3, 9, 10, 11]].isnan().all()
    assert permuted.rows.live_rows.tolist() == [0, 1, 4, 5, 6, 7, 8]


def test_a_token_gets_the_weighted_sum_of_its_rows():
    weights = torch.tensor([[0.5, 0.25], [9.0, 2.0], [0.5, 1.0], [9.0, 9.0], [1.0, 3.0]])
    sent = pre_permute(tokens(weights), CONTIG)
    back = post_permute(Gemm2Output(output=sent.rows.hidden_states), sent.restore, CONTIG)
    assert back.partial[:, 0].tolist() == [0.75, 4.0, 4.5, 0.0, 20.0]
    assert back.pending_weights is None


# Expanded rows to slabs.


def test_a_segments_rows_stand_at_the_top_of_their_slab():
    rows = pre_permute(expanded(), MASKED).rows
    assert rows.masked_m.tolist() == [3, 0, 5]
    assert rows.masked_m.dtype == torch.int32
    assert rows.hidden_states.shape == (3, 8, 2)
    assert rows.hidden_states[0, :3, 0].tolist() == [1, 2, 3]
    assert rows.hidden_states[2, :5, 0].tolist() == [5, 6, 7, 8, 9]


def test_the_rest_of_a_slab_is_poison():
    slabs = pre_permute(expanded(), MASKED).rows.hidden_states
    for expert, count in enumerate((3, 0, 5)):
        assert slabs[expert, count:].isnan().all()


def test_scales_go_with_their_rows():
    scale = torch.arange(16.0)[:, None]
    slabs = pre_permute(expanded(scale=scale), MASKED).rows.hidden_states_scale
    assert slabs[0, :3, 0].tolist() == [0, 1, 2]
    assert slabs[2, :5, 0].tolist() == [4, 5, 6, 7, 8]


def test_packed_scales_of_slabs_lie_with_rows_fastest():
    words = mn_major(torch.arange(32, dtype=torch.int32).view(16, 2))
    slabs = pre_permute(expanded(scale=words), MASKED).rows.hidden_states_scale
    assert (slabs.shape, slabs.stride()) == ((3, 8, 2), (16, 1, 8))
    assert slabs[2, :5].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15], [16, 17]]


def test_a_slab_may_be_full():
    assert expand_to_masked_slab(expanded(height=5), ALIGNMENT).masked_m.tolist() == [3, 0, 5]


def test_an_expert_with_more_rows_than_a_slab_is_an_error():
    with pytest.raises(SlabOverflowError, match=r"local expert 2 has 5 rows, its slab 4: psum is"):
        pre_permute(expanded(height=4), MASKED)


def test_slabs_go_back_to_the_rows_they_came_from_with_their_weights():
    sent = pre_permute(expanded(), MASKED)
    partial = post_permute(
        Gemm2Output(output=sent.rows.hidden_states), sent.restore, MASKED
    ).partial
    # (c + 1) * (1 + c / 64) has at most 8 bits for these rows.
    assert partial[REAL, 0].tolist() == [(c + 1) * (1 + c / 64) for c in (0, 1, 2)] + [
        5 * 68 / 64, 6 * 69 / 64, 7 * 70 / 64, 8 * 71 / 64, 9 * 72 / 64
    ]  # fmt: skip
    assert partial[FREE].isnan().all()


def one_route(weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """A slab of one row of 3, psum and weights of a buffer of 4."""
    return (
        torch.tensor([[[3.0]]], dtype=torch.bfloat16),
        torch.tensor([1], dtype=torch.int32),
        torch.tensor([weight, 0.0, 0.0, 0.0]),
    )


ODD_WEIGHT = 1 + 3 * 2.0**-9
"""Three times it is nearest to 3 + 2^-6; rounded first, to 1 + 2^-7, it gives 3 + 2^-5."""


def test_a_routes_product_with_its_weight_is_rounded_once():
    slab, psum, weights = one_route(ODD_WEIGHT)
    assert masked_slab_to_expand(slab, psum, weights, ALIGNMENT)[0].tolist() == [3 + 2.0**-6]


# Expanded rows left in place.


def test_rows_that_stay_are_the_received_ones():
    sent = expanded(scale=torch.arange(16.0)[:, None])
    rows = pre_permute(sent, CONTIG).rows
    assert rows.hidden_states is sent.hidden_states
    assert rows.hidden_states_scale is sent.hidden_states_scale
    assert rows.live_rows.tolist() == REAL


@pytest.mark.parametrize(
    ("psum", "expected"),
    [
        ([3, 4, 9], [0] * 4 + [2] * 8 + [-1] * 4),
        ([4, 7, 8], [0] * 4 + [1] * 4 + [-1] * 8),
        ([0, 0, 0], [-1] * 16),
        ([0, 1, 16], [1] * 4 + [2] * 12),
    ],
    ids=str,
)
def test_whole_segments_name_their_expert_and_rows_behind_them_none(psum, expected):
    psum = torch.tensor(psum, dtype=torch.int32)
    m_indices = ep_expand_init_m_indices_from_psum(psum, 16, ALIGNMENT)
    assert (m_indices.tolist(), m_indices.dtype) == (expected, torch.int32)


def test_weights_of_rows_that_stay_are_rounded_in_front_of_the_product():
    _, psum, weights = one_route(ODD_WEIGHT)
    sent = replace(expanded(psum=psum), topk_weights=weights)
    restore = pre_permute(sent, CONTIG).restore
    output = Gemm2Output(output=torch.full((4, 1), 3.0, dtype=torch.bfloat16))
    assert post_permute(output, restore, CONTIG).partial[0].tolist() == [3 + 2.0**-5]


@pytest.mark.parametrize("context", [CONTIG, MASKED], ids=["contig", "masked"])
def test_nothing_received_is_nothing_live(context):
    sent = expanded(psum=torch.zeros(3, dtype=torch.int32))
    rows = pre_permute(sent, context).rows
    counted = rows.live_rows if context is CONTIG else rows.masked_m.nonzero()
    assert counted.numel() == 0


@pytest.mark.parametrize("context", [CONTIG, MASKED], ids=["contig", "masked"])
def test_the_way_back_of_routes_keeps_ends_and_weights(context):
    sent = expanded()
    restore = pre_permute(sent, context).restore
    assert restore.psum is sent.psum
    assert restore.topk_weights is sent.topk_weights


def test_the_registered_pair_holds_both_directions():
    pair = permute_pair(DispatchFormat.DEEPEP_V2, RunnerBackend.DEEP_GEMM)
    assert (pair.pre, pair.post) == (pre_permute, post_permute)

"""Received rows into grouped ones: ids of all ranks are made local, local ones stay."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from moe.dispatched import (
    FlashInferDispatchOutput,
    FlashInferGatheredOutput,
    FlashInferHandle,
    GatheredHandle,
)
from moe.formats import DispatchFormat, GemmLayout, RunnerBackend, ScaleFormat
from moe.permute import PermuteContext, permute_pair
from moe.permute.flashinfer import post_permute, pre_permute
from moe.quant.fp8 import quantize_groups
from moe.stages import Gemm2Output

# Rank 2 of 4 holds experts 4 and 5. Two ranks wrote two rows and one; the fourth row is stale.
GLOBAL_IDS = [[4, 0, 5], [7, 5, -1], [3, 4, 6], [-1, -1, -1]]
LOCAL_IDS = [[0, -1, 1], [-1, 1, -1], [-1, 0, -1], [-1, -1, -1]]
WEIGHTS = torch.tensor([[0.5, 9, 0.25], [9, 2, 9], [9, 4, 9], [9, 9, 9]])
CONTEXT = PermuteContext(
    num_local_experts=2,
    num_experts=8,
    layout=GemmLayout.CONTIG,
    row_alignment=4,
    routed_scaling_factor=1.0,
    quantize=None,
    expert_start=4,
)
LAYOUTS = pytest.mark.parametrize("layout", list(GemmLayout))


def rows_of(width: int = 2) -> Tensor:
    """Row t is t + 1; the stale one is NaN."""
    rows = torch.arange(1, 5, dtype=torch.bfloat16)[:, None].repeat(1, width)
    rows[3] = torch.nan
    return rows


def written(width: int = 2) -> FlashInferDispatchOutput:
    nothing = torch.empty(0, 3, dtype=torch.int32)
    return FlashInferDispatchOutput(
        physical_ids=nothing,
        hidden_states=rows_of(width),
        topk_ids=torch.tensor(GLOBAL_IDS, dtype=torch.int32),
        topk_weights=WEIGHTS,
        handle=FlashInferHandle(
            target_rank=nothing, send_index=nothing, counts=torch.tensor([2, 1])
        ),
    )


def gathered() -> FlashInferGatheredOutput:
    return FlashInferGatheredOutput(
        physical_ids=torch.empty(0, 3, dtype=torch.int32),
        hidden_states=rows_of(),
        topk_ids=torch.tensor(LOCAL_IDS, dtype=torch.int32),
        topk_weights=WEIGHTS,
        handle=GatheredHandle(counts=torch.tensor([2, 2])),
    )


FORMS = pytest.mark.parametrize("sent", [written(), gathered()], ids=["decode", "extend"])


@FORMS
@LAYOUTS
def test_the_way_back_has_local_ids_in_either_form(sent, layout):
    restore = pre_permute(sent, replace(CONTEXT, layout=layout)).restore
    assert restore.topk_ids.tolist() == LOCAL_IDS
    assert (restore.output_index >= 0).tolist() == [[e >= 0 for e in ids] for ids in LOCAL_IDS]
    assert (restore.topk_ids.dtype, restore.output_index.dtype) == (torch.int32,) * 2


@FORMS
def test_the_bound_counts_every_slot_of_every_row(sent):
    """Twelve slots, two experts, blocks of 4: two begun, and two more that could be full."""
    rows = pre_permute(sent, CONTEXT).rows
    assert rows.m_indices.tolist() == [0, 0, -1, -1, 1, 1] + [-1] * 10


@FORMS
def test_slabs_hold_the_routes_of_local_experts(sent):
    rows = pre_permute(sent, replace(CONTEXT, layout=GemmLayout.MASKED)).rows
    assert (rows.masked_m.tolist(), rows.hidden_states.shape) == ([2, 2], (2, 256, 2))


@FORMS
@LAYOUTS
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_identity_experts_give_back_each_row_times_its_local_weights_and_the_factor(
    sent, layout, factor
):
    context = replace(CONTEXT, layout=layout, routed_scaling_factor=factor)
    permuted = pre_permute(sent, context)
    output = Gemm2Output(output=permuted.rows.hidden_states)
    back = post_permute(output, permuted.restore, context)
    assert back.partial[:, 0].tolist() == [factor * 0.75, factor * 4, factor * 12, 0]
    assert back.pending_weights is None


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_rows_are_quantised_here_and_a_stale_one_disturbs_none(scale_format):
    quantize = partial(quantize_groups, scale_format=scale_format)
    permuted = pre_permute(written(width=128), replace(CONTEXT, quantize=quantize))
    index = permuted.restore.output_index
    whole = quantize_groups(rows_of(128)[:3], scale_format)
    token, slot = (index >= 0).nonzero(as_tuple=True)
    places = index[token, slot].long()
    codes = permuted.rows.hidden_states.view(torch.uint8)[places]
    assert torch.equal(codes, whole.values.view(torch.uint8)[token])
    assert torch.equal(permuted.rows.hidden_states_scale[places], whole.scale[token])


def test_the_registered_pair_holds_both_directions():
    pair = permute_pair(DispatchFormat.FLASHINFER, RunnerBackend.DEEP_GEMM)
    assert (pair.pre, pair.post) == (pre_permute, post_permute)

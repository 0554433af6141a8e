"""Every format can be judged, and each says what it hands over."""

from itertools import combinations_with_replacement

import pytest
import torch

from moe.formats import DispatchFormat, Stage
from reports.verdict.format_views import FORMAT_VIEWS
from reports.verdict.formats.deepep_normal import DeepEpNormalView
from reports.verdict.formats.deepep_v2 import DeepEpV2View
from reports.verdict.formats.deepep_v2_expanded import (
    DeepEpV2ExpandedContigView,
    DeepEpV2ExpandedView,
)
from reports.verdict.formats.flashinfer import FlashInferDecodeView, FlashInferExtendView
from reports.verdict.formats.grouped_tokens import rows_at_most, rows_with_a_spare
from reports.verdict.formats.low_latency import LowLatencyBf16WireView, LowLatencyView
from reports.verdict.formats.routes import local_slots, owner_of_slot
from reports.verdict.formats.standard import StandardView

VIEWS = [
    DeepEpNormalView(),
    DeepEpV2View(),
    DeepEpV2ExpandedView(),
    DeepEpV2ExpandedContigView(),
    LowLatencyView(),
    LowLatencyBf16WireView(),
    StandardView(),
    FlashInferDecodeView(),
    FlashInferExtendView(),
]


def test_every_dispatcher_can_be_judged():
    assert set(FORMAT_VIEWS) == set(DispatchFormat)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: type(view).__name__)
def test_a_view_declares_dtypes_only_of_tensors_that_it_requires_or_the_layout_does(view):
    dispatched = {tensor for stage, tensor in view.stored_as if stage is Stage.DISPATCH}
    assert dispatched <= set(view.shapes[Stage.DISPATCH])
    assert set(view.quantised) <= set(view.shapes[Stage.DISPATCH])


@pytest.mark.parametrize("block", [1, 32, 128])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("routes", [0, 1, 2, 33, 65])
def test_the_row_bound_is_what_the_worst_distribution_needs(routes, slots, block):
    """Every way to cut so many routes into the slots, by their cumulated counts."""
    ends = combinations_with_replacement(range(routes + 1), slots - 1)
    counts = ([b - a for a, b in zip((0, *cut), (*cut, routes), strict=True)] for cut in ends)
    assert rows_at_most(routes, slots, block) == max(
        sum(-(-count // block) * block for count in one) for one in counts
    )


@pytest.mark.parametrize(
    ("routes", "rows"), [(0, 384), (1, 512), (128, 512), (129, 640), (6144, 6528)]
)
def test_sm120s_buffer_has_a_spare_block_for_each_of_three_slots(routes, rows):
    assert rows_with_a_spare(routes, 3, 128) == rows


IDS = torch.tensor([[0, 1, 2], [7, -1, 8]], dtype=torch.int32)


def test_a_slots_owner_is_the_ep_rank_whose_run_it_is_in(clean_ue8m0):
    layer = clean_ue8m0.resolved.judged  # two slots a rank
    assert owner_of_slot(layer, IDS).tolist() == [[0, 0, 1], [3, -1, -1]]


@pytest.mark.parametrize(
    ("rank", "local"),
    [
        (0, [[0, 1, -1], [-1, -1, -1]]),
        (1, [[-1, -1, 0], [-1, -1, -1]]),
        (3, [[-1] * 3, [1, -1, -1]]),
    ],
)
def test_a_rank_counts_its_own_slots_from_zero(clean_ue8m0, rank, local):
    assert local_slots(clean_ue8m0.resolved.judged, rank, IDS).tolist() == local

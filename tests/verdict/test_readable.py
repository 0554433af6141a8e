"""Traces that cannot be judged are named with rank, stage and tensor, not crashed on."""

from dataclasses import replace

import pytest
import torch

from moe.formats import GemmLayout, Stage
from moe.trace import RankTrace
from reports.verdict.formats.deepep_normal import DeepEpNormalView
from reports.verdict.readable import GROUPED, SHAPES, UnreadableTraceError, check_readable
from tests.verdict.layouts import LAYOUTS

VIEW = DeepEpNormalView()
NOT_DEMANDED = {"rows.live_rows", "correction_bias"}
"""An aid that other engines lack, and a tensor that has a check of its own."""

OF_LAYOUTS = [
    pytest.param(name, stage, tensor, id=f"{name}-{stage}-{tensor}")
    for name, layout in LAYOUTS.items()
    for stage, tensor in layout.traced()
    if not tensor.endswith("scale") and tensor not in NOT_DEMANDED
    if not tensor.startswith("shared.w")
]
EVERY_TENSOR = [
    (stage, name)
    for table in (SHAPES, VIEW.shapes, GROUPED[GemmLayout.CONTIG])
    for stage, shapes in table.items()
    for name in shapes
]


def refusal(run, traces) -> UnreadableTraceError:
    with pytest.raises(UnreadableTraceError) as caught:
        check_readable(run.resolved.judged, VIEW, traces)
    return caught.value


def test_a_clean_trace_can_be_judged(clean):
    check_readable(clean.resolved.judged, VIEW, clean.traces)


@pytest.mark.parametrize(("stage", "name"), EVERY_TENSOR)
def test_a_missing_tensor_is_named(clean, stage, name):
    rank = clean.last_rank
    stages = dict(clean.traces[rank].stages)
    stages[stage] = {key: value for key, value in stages[stage].items() if key != name}
    traces = [*clean.traces[:rank], RankTrace(rank=rank, stages=stages)]
    error = refusal(clean, traces)
    assert (error.rank, error.stage) == (rank, stage)
    assert f"no tensor {name};" in error.detail


@pytest.mark.parametrize(("stage", "name"), EVERY_TENSOR)
def test_a_tensor_of_another_rank_of_shape_is_named(clean, stage, name):
    rank = clean.last_rank
    tensor = clean.tensor(stage, rank, name)
    error = refusal(clean, clean.changed(stage, rank, {name: tensor[None]}))
    assert (error.rank, error.stage) == (rank, stage)
    assert error.detail.startswith(f"{name} is [1, ")


@pytest.mark.parametrize(("layout", "stage", "name"), OF_LAYOUTS)
def test_a_tensor_that_no_rank_of_a_layout_left_is_named(clean_layout, layout, stage, name):
    run = clean_layout(layout)
    traces = []
    for trace in run.traces:
        left = {key: value for key, value in trace[stage].items() if key != name}
        traces.append(replace(trace, stages={**trace.stages, stage: left}))
    with pytest.raises(UnreadableTraceError) as caught:
        run.judged(traces)
    assert (caught.value.rank, caught.value.stage) == (0, stage)
    assert f"no tensor {name};" in caught.value.detail


def test_a_stage_that_was_not_captured_is_named(clean):
    stages = {s: t for s, t in clean.traces[0].stages.items() if s is not Stage.COMBINE}
    error = refusal(clean, [RankTrace(rank=0, stages=stages), *clean.traces[1:]])
    assert (error.rank, error.stage, error.detail) == (0, Stage.COMBINE, "not captured")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("handle.source_rank", 4096),
        ("handle.source_rank", -1),
        ("handle.source_row", 4096),
        ("handle.source_row", -1),
    ],
)
def test_a_received_row_from_nowhere_is_named(clean, name, value):
    rank = clean.last_rank
    tensor = clean.tensor(Stage.DISPATCH, rank, name).clone()
    tensor[0] = value
    with pytest.raises(UnreadableTraceError) as caught:
        clean.judged(clean.changed(Stage.DISPATCH, rank, {name: tensor}))
    assert (caught.value.rank, caught.value.stage) == (rank, Stage.DISPATCH)
    assert "received row 0" in caught.value.detail


def test_a_scale_that_one_rank_lacks_is_named(quantised):
    rank = quantised.last_rank
    stages = dict(quantised.traces[rank].stages)
    stages[Stage.TAIL] = {k: v for k, v in stages[Stage.TAIL].items() if k != "shared.input_scale"}
    error = refusal(quantised, [*quantised.traces[:rank], RankTrace(rank=rank, stages=stages)])
    assert (error.rank, error.stage) == (rank, Stage.TAIL)
    assert error.detail.startswith("shared.input_scale here or on rank 0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda scale: scale[1:], " is torch.", id="fewer rows"),
        pytest.param(lambda scale: scale.repeat(1, 4), " is torch.", id="more columns"),
        pytest.param(
            lambda scale: (
                scale.new_zeros(len(scale), 1, dtype=torch.int32)
                if scale.dtype == torch.float32
                else torch.ones(len(scale), 2)
            ),
            "on rank 0",
            id="stored in the other way",
        ),
    ],
)
@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (Stage.DISPATCH, "hidden_states_scale"),
        (Stage.PRE_PERMUTE, "rows.hidden_states_scale"),
        (Stage.TAIL, "shared.input_scale"),
    ],
)
def test_scales_that_do_not_stand_beside_their_rows_are_named(quantised, stage, name, change, said):
    rank = quantised.last_rank
    scale = quantised.tensor(stage, rank, name)
    error = refusal(quantised, quantised.changed(stage, rank, {name: change(scale)}))
    assert (error.rank, error.stage) == (rank, stage)
    assert error.detail.startswith(name)
    assert said in error.detail

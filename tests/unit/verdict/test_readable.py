"""Traces that cannot be judged are named with rank, stage and tensor, not crashed on."""

import pytest

from moe.formats import Stage
from moe.trace import RankTrace
from reports.verdict.readable import SHAPES, UnreadableTraceError, check_readable

EVERY_TENSOR = [(stage, name) for stage, shapes in SHAPES.items() for name in shapes]


def refusal(run, traces) -> UnreadableTraceError:
    with pytest.raises(UnreadableTraceError) as caught:
        check_readable(run.resolved.judged, traces)
    return caught.value


def test_a_clean_trace_can_be_judged(clean):
    check_readable(clean.resolved.judged, clean.traces)


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
    error = refusal(clean, clean.changed(Stage.DISPATCH, rank, {name: tensor}))
    assert (error.rank, error.stage) == (rank, Stage.DISPATCH)
    assert "received row 0" in error.detail


def test_a_scale_that_one_rank_lacks_is_named(quantised):
    rank = quantised.last_rank
    stages = dict(quantised.traces[rank].stages)
    stages[Stage.TAIL] = {k: v for k, v in stages[Stage.TAIL].items() if k != "shared.input_scale"}
    error = refusal(quantised, [*quantised.traces[:rank], RankTrace(rank=rank, stages=stages)])
    assert (error.rank, error.stage) == (rank, Stage.TAIL)
    assert error.detail.startswith("shared.input_scale here or on rank 0")

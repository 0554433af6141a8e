"""What a run leaves behind, saved and loaded again."""

import pytest
import torch
from safetensors.torch import save_file

from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from moe.stages import (
    ContigInput,
    GlueOutOutput,
    LogicalIds,
    PrePermuteOutput,
    Restore,
    TopKOutput,
)
from moe.trace import (
    InputOverwrittenError,
    RankTrace,
    RecordingTap,
    TraceFilesError,
    load_traces,
    named_tensors,
    save_traces,
)


def layer_input(*values: float) -> GlueOutOutput:
    return GlueOutOutput(hidden_states=torch.tensor([values]))


def grouped(scale: torch.Tensor | None) -> PrePermuteOutput:
    return PrePermuteOutput(
        rows=ContigInput(
            hidden_states=torch.zeros(2, 3),
            hidden_states_scale=scale,
            m_indices=torch.zeros(2, dtype=torch.int32),
            live_rows=torch.arange(2),
        ),
        restore=Restore(
            topk_ids=torch.zeros(1, 2, dtype=torch.int64),
            topk_weights=torch.zeros(1, 2),
            output_index=torch.zeros(1, 2, dtype=torch.int64),
        ),
    )


ROWS = torch.arange(12)
TENSORS = {
    "bf16": (ROWS / 7).to(torch.bfloat16).view(3, 4),
    "e4m3": ROWS.to(torch.uint8).view(torch.float8_e4m3fn).view(3, 4),
    "e8m0": ROWS.to(torch.uint8).view(torch.float8_e8m0fnu).view(3, 4),
    "fp32": (ROWS / 7).view(3, 4),
    "fp64": (ROWS.to(torch.float64) / 7).view(3, 4),
    "int32": ROWS.to(torch.int32).view(3, 4),
    "int64": ROWS - 5,
    "uint8": ROWS.to(torch.uint8),
    "bool": ROWS > 3,
    "mn_major": mn_major(ROWS.to(torch.int32).view(6, 2)),
    "mn_major_column": mn_major(ROWS[:5, None].to(torch.int32)),
    "no_rows": torch.zeros(0, 4, dtype=torch.bfloat16),
    "nan": torch.tensor([torch.nan, -torch.nan]),
}


def test_a_tensor_is_named_by_the_fields_that_lead_to_it():
    assert [name for name, _ in named_tensors(grouped(torch.zeros(2, 1)))] == [
        "rows.hidden_states",
        "rows.hidden_states_scale",
        "rows.m_indices",
        "rows.live_rows",
        "restore.topk_ids",
        "restore.topk_weights",
        "restore.output_index",
    ]


def test_a_field_without_a_tensor_has_no_name():
    names = [name for name, _ in named_tensors(grouped(None))]
    assert "rows.hidden_states_scale" not in names


def test_a_tap_hands_on_the_value_it_was_given():
    value = layer_input(1.0)
    assert RecordingTap()(Stage.GLUE_IN, value) is value


def test_a_tap_keeps_the_tensors_of_every_stage():
    tap = RecordingTap()
    first, second = layer_input(1.0), layer_input(2.0)
    tap(Stage.GLUE_IN, first)
    tap(Stage.GLUE_OUT, second)
    trace = tap.trace(rank=3)
    assert trace.rank == 3
    assert trace[Stage.GLUE_IN]["hidden_states"] is first.hidden_states
    assert trace[Stage.GLUE_OUT]["hidden_states"] is second.hidden_states


def overwrite(tap: RecordingTap) -> None:
    ids = LogicalIds(torch.zeros(1, 2, dtype=torch.int32))
    topk = TopKOutput(logits=torch.zeros(1, 4), topk_ids=ids, topk_weights=torch.zeros(1, 2))
    tap(Stage.GLUE_IN, layer_input(1.0))
    tap(Stage.ROUTE, topk)
    topk.topk_weights[:, 1] += 1


def test_a_stage_that_writes_into_what_it_was_given_is_named():
    tap = RecordingTap()
    overwrite(tap)
    with pytest.raises(InputOverwrittenError, match="stage dispatch wrote into route/topk_weights"):
        tap(Stage.DISPATCH, layer_input(2.0))


def test_a_stage_that_writes_into_what_an_earlier_recorder_saw_is_named():
    weights = RecordingTap()
    loaded = layer_input(1.0)
    weights(Stage.WEIGHTS, loaded)
    tap = RecordingTap(earlier=weights)
    tap(Stage.GLUE_IN, layer_input(1.0))
    loaded.hidden_states.add_(1)
    with pytest.raises(InputOverwrittenError, match="stage route wrote into weights/hidden_states"):
        tap(Stage.ROUTE, layer_input(1.0))


def test_stages_that_write_into_nothing_pass():
    tap = RecordingTap()
    for stage in (Stage.GLUE_IN, Stage.ROUTE, Stage.DISPATCH):
        tap(stage, layer_input(1.0))
    assert list(tap.stages) == [Stage.GLUE_IN, Stage.ROUTE, Stage.DISPATCH]


def test_every_file_holds_one_rank(tmp_path):
    traces = [RankTrace(rank=rank, stages={Stage.ROUTE: TENSORS}) for rank in (0, 11)]
    save_traces(traces, tmp_path / "trace")
    files = sorted(path.name for path in (tmp_path / "trace").iterdir())
    assert files == ["rank_00000.safetensors", "rank_00011.safetensors"]


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_loaded_as_it_was_saved(tmp_path, name):
    save_traces([RankTrace(rank=0, stages={Stage.DISPATCH: {name: TENSORS[name]}})], tmp_path)
    (trace,) = load_traces(tmp_path)
    got, expected = trace[Stage.DISPATCH][name], TENSORS[name]
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(as_bytes(got), as_bytes(expected))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_loaded_with_the_strides_it_was_saved_with(tmp_path, name):
    save_traces([RankTrace(rank=0, stages={Stage.DISPATCH: {name: TENSORS[name]}})], tmp_path)
    (trace,) = load_traces(tmp_path)
    assert trace[Stage.DISPATCH][name].stride() == TENSORS[name].stride()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def test_names_and_stages_are_loaded_as_they_were_saved(tmp_path):
    stages = {
        Stage.WEIGHTS: {"experts.w13.values": TENSORS["e4m3"]},
        Stage.DISPATCH: {"handle.source_row": TENSORS["int64"], "wire": TENSORS["e4m3"]},
    }
    save_traces([RankTrace(rank=2, stages=stages)], tmp_path)
    (trace,) = load_traces(tmp_path)
    assert {stage: set(named) for stage, named in trace.stages.items()} == {
        Stage.WEIGHTS: {"experts.w13.values"},
        Stage.DISPATCH: {"handle.source_row", "wire"},
    }


def test_ranks_are_loaded_in_order(tmp_path):
    traces = [
        RankTrace(rank=rank, stages={Stage.ROUTE: {"logits": torch.tensor([rank])}})
        for rank in (10, 2, 0)
    ]
    save_traces(traces, tmp_path)
    assert [trace.rank for trace in load_traces(tmp_path)] == [0, 2, 10]


def test_several_ranks_may_lie_in_one_file(tmp_path):
    save_file(
        {"route/1/logits": torch.ones(1), "route/0/logits": torch.zeros(1)},
        tmp_path / "engine.safetensors",
    )
    assert [trace[Stage.ROUTE]["logits"].item() for trace in load_traces(tmp_path)] == [0.0, 1.0]


@pytest.mark.parametrize(
    "key",
    ["logits", "route/logits", "route/x/logits", "route/-1/logits", "routing/0/logits", "route/0/"],
)
def test_a_tensor_of_another_name_is_refused_with_the_form(tmp_path, key):
    save_file({key: torch.zeros(1)}, tmp_path / "engine.safetensors")
    with pytest.raises(ValueError, match=f"tensor '{key}' is not named <stage>/<rank>/<name>"):
        load_traces(tmp_path)


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        load_traces(tmp_path)


def test_every_problem_of_every_file_is_listed_at_once(tmp_path):
    save_file(
        {"logits": torch.zeros(1), "route/0/logits": torch.zeros(1)}, tmp_path / "a.safetensors"
    )
    save_file({"route/0/logits": torch.zeros(1)}, tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(TraceFilesError) as caught:
        load_traces(tmp_path)
    listed = caught.value.problems
    assert [problem.partition(": ")[0] for problem in listed] == [
        str(tmp_path / f"{name}.safetensors") for name in "abc"
    ]
    assert "'logits' is not named" in listed[0]
    assert "'route/0/logits' is in another file, too" in listed[1]
    assert "no safetensors file" in listed[2]


@pytest.mark.parametrize(
    "strides", ["", "1", "a,b", "-1,6", "0,0", "1,1", "1,5", "1,900000000000", "1,6,1", "²,6"]
)
def test_strides_that_give_cells_no_place_of_their_own_are_refused(tmp_path, strides):
    save_file(
        {"route/0/logits": torch.zeros(6, 2)},
        tmp_path / "a.safetensors",
        {"route/0/logits": strides},
    )
    with pytest.raises(TraceFilesError, match="cannot have strides"):
        load_traces(tmp_path)


def test_a_file_of_somebody_else_says_nothing_of_strides(tmp_path):
    save_file({"route/0/logits": torch.zeros(1)}, tmp_path / "engine.safetensors")
    save_traces([RankTrace(rank=1, stages={Stage.ROUTE: {"logits": torch.zeros(1)}})], tmp_path)
    assert [trace.has_strides for trace in load_traces(tmp_path)] == [False, True]

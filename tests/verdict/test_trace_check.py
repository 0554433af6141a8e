"""What a trace has to be: every problem is named at once, and no good trace has one."""

from dataclasses import replace

import pytest
import torch

from moe.formats import Stage
from reports.verdict.captured_judge import CapturedJudge
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.trace_check import trace_problems
from tests.verdict.captured_runs import judged_alone, kept, replaced
from tests.verdict.deepep_v2_runs import FORMS
from tests.verdict.layouts import LAYOUTS


def problems(run, traces):
    return trace_problems(run.resolved.judged, traces)


def problems_with(run, stage, name, tensor):
    return problems(run, replaced(run.traces, 0, stage, name, tensor))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trace_of_every_layout_has_no_problem(clean_layout, layout):
    run = clean_layout(layout)
    assert problems(run, run.traces) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_trace_of_every_form_of_deepep_v2_has_no_problem(clean_form, form):
    run = clean_form(form)
    assert problems(run, run.traces) == []


def test_a_trace_without_a_stage_has_no_problem(clean_ue8m0):
    traces = kept(clean_ue8m0.traces, lambda stage, name: stage is not Stage.GEMM1)
    assert problems(clean_ue8m0, traces) == []


def test_another_dtype_is_named_with_the_one_that_is_due(clean_ue8m0):
    gate_up = clean_ue8m0.tensor(Stage.GEMM1, 0, "gate_up")
    rows, width = gate_up.shape
    (problem,) = problems_with(clean_ue8m0, Stage.GEMM1, "gate_up", gate_up.float())
    assert problem == (
        f"gemm1/0/gate_up: read float32 [{rows}, {width}], due bfloat16 [M = {rows}, 2I = {width}]"
    )


def test_another_shape_is_named_with_the_one_that_is_due(clean_ue8m0):
    logits = clean_ue8m0.tensor(Stage.ROUTE, 0, "logits")
    (problem,) = problems_with(clean_ue8m0, Stage.ROUTE, "logits", logits.T.contiguous())
    assert problem == "route/0/logits: read float32 [8, 5], due float32 [T = 5, E = 8]"


def test_weight_scales_of_another_shape_are_named(clean_fp32):
    scale = clean_fp32.tensor(Stage.WEIGHTS, 1, "experts.w2.scale")
    traces = replaced(clean_fp32.traces, 1, Stage.WEIGHTS, "experts.w2.scale", scale[:, :1])
    (problem,) = problems(clean_fp32, traces)
    assert problem == (
        f"weights/1/experts.w2.scale: read float32 {[4, 1, 1]}, due float32 {list(scale.shape)}"
    )


def test_an_unknown_name_is_answered_with_the_nearest(clean_ue8m0):
    (problem,) = problems_with(clean_ue8m0, Stage.GEMM1, "gateup", torch.zeros(1))
    assert problem == (
        "gemm1/0/gateup: this layer has no such tensor; did you mean gemm1/0/gate_up?"
    )


def test_a_tensor_that_another_rank_has_is_missing(clean_ue8m0):
    (problem,) = problems_with(clean_ue8m0, Stage.GEMM1, "gate_up", None)
    assert problem == "gemm1/0/gate_up: missing, but rank 1 has one"


def test_codes_without_scales_are_named(clean_ue8m0):
    traces = kept(clean_ue8m0.traces, lambda stage, name: name != "rows.hidden_states_scale")
    assert problems(clean_ue8m0, traces)[0] == (
        "pre_permute/0/rows.hidden_states_scale: missing, but rows.hidden_states cannot be read "
        "without its scales"
    )


def test_weights_in_part_are_named(clean_ue8m0):
    traces = kept(clean_ue8m0.traces, lambda stage, name: name != "gate_weight")
    assert problems(clean_ue8m0, traces)[0] == (
        "weights/0/gate_weight: missing, but weights are captured as a whole or not at all"
    )


def test_ranks_that_are_missing_and_ranks_too_many_are_named(clean_ue8m0):
    traces = [trace if trace.rank else replace(trace, rank=7) for trace in clean_ue8m0.traces]
    assert problems(clean_ue8m0, traces) == [
        "rank 0 has no tensor",
        "rank 7 does not exist: there are 4",
    ]


@pytest.mark.parametrize(
    ("stage", "name", "value"),
    [
        (Stage.WEIGHTS, "expert_ids", 8),
        (Stage.DISPATCH, "handle.source_rank", 4),
        (Stage.PRE_PERMUTE, "rows.m_indices", 2),
        (Stage.PRE_PERMUTE, "restore.output_index", 1 << 40),
    ],
)
def test_an_integer_out_of_range_is_named_with_its_place(clean_ue8m0, stage, name, value):
    tensor = clean_ue8m0.tensor(stage, 0, name).clone()
    tensor.view(-1)[0] = value
    (problem,) = problems_with(clean_ue8m0, stage, name, tensor)
    assert problem.startswith(f"{stage}/0/{name}: {value} at [0")
    assert " is outside " in problem


@pytest.mark.parametrize("form", FORMS)
def test_an_end_of_a_segment_behind_all_rows_is_named(clean_form, form):
    run = clean_form(form)
    psum = run.tensor(Stage.DISPATCH, 0, "psum").clone()
    psum[-1] = 1 << 30
    (problem,) = problems_with(run, Stage.DISPATCH, "psum", psum)
    assert problem.startswith("dispatch/0/psum: 1073741824 at [")


def test_a_row_that_comes_from_nowhere_cannot_be_mapped(clean_ue8m0):
    rows = clean_ue8m0.tensor(Stage.DISPATCH, 0, "handle.source_row").clone()
    rows[0] = 1 << 40
    traces = replaced(clean_ue8m0.traces, 0, Stage.DISPATCH, "handle.source_row", rows)
    assert problems(clean_ue8m0, traces) == []
    with pytest.raises(UnreadableTraceError, match=r"received row 0 comes from row 1099511627776"):
        judged_alone(clean_ue8m0, traces)


def test_a_token_that_is_no_number_is_named(clean_ue8m0):
    own = clean_ue8m0.tensor(Stage.GLUE_IN, 0, "own").clone()
    own[2, 5] = torch.nan
    (problem,) = problems_with(clean_ue8m0, Stage.GLUE_IN, "own", own)
    assert problem == "glue_in/0/own: row 2, a token, holds NaN or infinity; 1 such rows"


def test_all_problems_are_named_at_once(clean_ue8m0):
    traces = replaced(clean_ue8m0.traces, 0, Stage.ROUTE, "logits", torch.zeros(1))
    traces = replaced(traces, 2, Stage.GEMM2, "output", None)
    traces = replaced(traces, 3, Stage.TAIL, "outptu", torch.zeros(1))
    assert [problem.partition(":")[0] for problem in problems(clean_ue8m0, traces)] == [
        "route/0/logits",
        "tail/3/outptu",
        "gemm2/2/output",
    ]


def garbage(tensor):
    bits = torch.arange(tensor.numel() * tensor.element_size()) * 37 % 251
    return bits.to(torch.uint8).view(tensor.dtype).view(tensor.shape)


CHANGES = {
    "dropped": lambda tensor: None,
    "of another dtype": lambda tensor: tensor.to(
        torch.float64 if tensor.is_floating_point() else torch.float32
    ),
    "transposed": lambda tensor: tensor.mT if tensor.dim() > 1 else tensor[:, None],
    "truncated": lambda tensor: tensor[:-1],
    "deeper": lambda tensor: tensor[None],
    "a number": lambda tensor: torch.tensor(3),
    "garbage": garbage,
    "minus ones": lambda tensor: (torch.zeros(tensor.shape) - 1).to(tensor.dtype),
}


@pytest.fixture(scope="module")
def judge(clean_fp32):
    """Has compared the weights, which take most of a judgement's time."""
    return CapturedJudge(clean_fp32.resolved.judged)


def objections(run, traces, judge):
    """Everything that anybody has to say against a trace."""
    try:
        return trace_problems(run.resolved.judged, traces) or (
            judged_alone(run, traces, judge).ledger.deviations
        )
    except UnreadableTraceError as error:
        return [error]


EVERY_CHANGE = [
    pytest.param(stage, name, change, id=f"{stage}-{name}-{change}")
    for stage, name in LAYOUTS["tp_ep_all_to_all"].traced()
    for change in CHANGES
    if (name, change) != ("rows.live_rows", "dropped")  # nothing is lost without them
]


@pytest.mark.parametrize(("stage", "name", "change"), EVERY_CHANGE)
def test_a_changed_tensor_is_objected_to(clean_fp32, judge, stage, name, change):
    run = clean_fp32
    rank = next(trace.rank for trace in run.traces if trace[stage][name].numel())
    changed = CHANGES[change](run.tensor(stage, rank, name))
    traces = replaced(run.traces, rank, stage, name, changed)
    assert objections(run, traces, None if stage is Stage.WEIGHTS else judge)

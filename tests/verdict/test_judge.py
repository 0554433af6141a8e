"""The whole judgement: silent on clean runs, one blame for a bug, the bug behind it found too."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from actors.world import LoopbackRanks
from moe.faults import Fault, FaultKind
from moe.formats import Stage
from reports.verdict.judge import Judge
from scenarios.inputs import deal

OF_OWN_TOKENS = (Stage.GLUE_IN, Stage.ROUTE, Stage.COMBINE, Stage.TAIL, Stage.GLUE_OUT)


def test_a_clean_run_has_no_deviation(clean):
    assert clean.judged().deviations == []


def test_every_stage_and_rank_is_entered_at_most_at_its_band(clean):
    worst = clean.judged().worst
    tokens = clean.tokens
    assert set(worst) == {
        (stage, rank)
        for stage in Stage
        for rank in range(len(tokens))
        if tokens[rank] or stage not in OF_OWN_TOKENS
    }
    assert max(worst.values()) <= 1


def test_a_judge_that_is_used_twice_says_the_same(clean):
    assert clean.judged().worst == clean.judged().worst


def test_traces_are_judged_alike_after_a_round_trip_through_values(clean):
    """The judge reads values: a copy of every tensor in its own layout changes nothing."""
    traces = list(clean.traces)
    for rank, trace in enumerate(traces):
        stages = {
            stage: {name: _same_layout(tensor) for name, tensor in named.items()}
            for stage, named in trace.stages.items()
        }
        traces[rank] = replace(trace, stages=stages)
    assert clean.judged(traces).worst == clean.judged().worst


def _same_layout(tensor):
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def test_a_second_bug_behind_the_first_is_reported(clean, last_places):
    gate_up = clean.tensor(Stage.GEMM1, clean.last_rank, "gate_up")
    routed = clean.tensor(Stage.COMBINE, 0, "routed")
    row = clean.route(clean.last_rank).row
    spoiled = last_places(gate_up, row, int(gate_up[row].float().abs().argmax()), 2)
    traces = clean.changed(Stage.GEMM1, clean.last_rank, {"gate_up": spoiled})
    stages = dict(traces[0].stages)
    far = last_places(routed, 1, int(routed[1].float().abs().argmax()), 2)
    stages[Stage.COMBINE] = {"routed": far}
    both = [replace(traces[0], stages=stages), *traces[1:]]
    found = [(one.stage, one.rank, one.tensor) for one in clean.judged(both).deviations]
    assert found[0] == (Stage.GEMM1, clean.last_rank, "gate_up")
    assert (Stage.COMBINE, 0, "routed") in found


def test_the_earliest_stage_comes_first_even_if_a_later_error_is_larger(clean, last_places):
    output = clean.tensor(Stage.GEMM2, 0, "output")
    traces = clean.changed(
        Stage.GEMM2, 0, {"output": last_places(output, clean.route(0).row, 0, 2)}
    )
    last = traces[clean.last_rank]
    tail = {**last[Stage.TAIL], "output": 100 * last[Stage.TAIL]["output"]}
    traces[clean.last_rank] = replace(last, stages={**last.stages, Stage.TAIL: tail})
    deviations = clean.judged(traces).deviations
    assert (deviations[0].stage, deviations[0].rank) == (Stage.GEMM2, 0)
    assert max(deviations[1:], key=lambda one: one.ratio).stage is not Stage.GEMM2


def _grown(field: str) -> Callable:
    """A stage's value with one of its tensors 6 % larger."""

    def act(value, context):
        return replace(value, **{field: (getattr(value, field) * 1.0625)})

    return act


def _weights_grown(value, context):
    w2 = value.experts.w2.values
    flipped = w2.view(torch.uint8).flip(1).view(w2.dtype)
    return replace(
        value, experts=replace(value.experts, w2=replace(value.experts.w2, values=flipped))
    )


def _restore_grown(value, context):
    weights = value.restore.topk_weights * 1.0625
    return replace(value, restore=replace(value.restore, topk_weights=weights))


def _wrong_expert(value, context):
    experts = value.rows.m_indices.clone()
    experts[:128] = 1
    return replace(value, rows=replace(value.rows, m_indices=experts))


def _no_expert(value, context):
    experts = value.rows.m_indices.clone()
    experts[:128] = -1
    return replace(value, rows=replace(value.rows, m_indices=experts))


def _padding_row_weighed(value, context):
    ids, weights, index = (
        tensor.clone()
        for tensor in (
            value.restore.topk_ids,
            value.restore.topk_weights,
            value.restore.output_index,
        )
    )
    place = tuple((ids < 0).nonzero()[0])
    ids[place], weights[place], index[place] = 0, 0.5, 127
    restore = replace(value.restore, topk_ids=ids, topk_weights=weights, output_index=index)
    return replace(value, restore=restore)


IN_FLIGHT = {
    "weights": (Stage.WEIGHTS, _weights_grown),
    "glue_in": (Stage.GLUE_IN, _grown("hidden_states")),
    "route": (Stage.ROUTE, _grown("topk_weights")),
    "dispatch": (Stage.DISPATCH, _grown("topk_weights")),
    "pre_permute": (Stage.PRE_PERMUTE, _restore_grown),
    "pre_permute, wrong expert": (Stage.PRE_PERMUTE, _wrong_expert),
    "pre_permute, no expert": (Stage.PRE_PERMUTE, _no_expert),
    "pre_permute, padding row": (Stage.PRE_PERMUTE, _padding_row_weighed),
    "gemm1": (Stage.GEMM1, _grown("gate_up")),
    "gemm2": (Stage.GEMM2, _grown("output")),
    "post_permute": (Stage.POST_PERMUTE, _grown("partial")),
    "combine": (Stage.COMBINE, _grown("routed")),
    "tail": (Stage.TAIL, _grown("output")),
    "glue_out": (Stage.GLUE_OUT, _grown("hidden_states")),
}


STANDARD_IN_FLIGHT = {
    case: IN_FLIGHT[case]
    for case in (
        "weights",
        "glue_in",
        "route",
        "dispatch",
        "pre_permute",
        "gemm1",
        "gemm2",
        "post_permute",
        "combine",
        "tail",
        "glue_out",
    )
}


@pytest.mark.parametrize("case", STANDARD_IN_FLIGHT)
@pytest.mark.parametrize("layout", ["dp_tp_all_reduce", "cp_gather"])
def test_an_error_on_one_rank_of_a_gathered_layer_is_blamed_on_it_alone(clean_layout, layout, case):
    run = clean_layout(layout)
    stage, act = STANDARD_IN_FLIGHT[case]
    deviations = _judged_with(run, stage, act)
    assert {(one.stage, one.rank) for one in deviations} == {(stage, run.last_rank)}


@pytest.mark.parametrize("case", IN_FLIGHT)
def test_an_error_that_runs_on_through_the_layer_is_blamed_on_its_stage_alone(clean, case):
    stage, act = IN_FLIGHT[case]
    deviations = _judged_with(clean, stage, act)
    assert {(one.stage, one.rank) for one in deviations} == {(stage, clean.last_rank)}


def test_an_error_of_the_activation_is_blamed_on_it_alone(quantised):
    def act(value, context):
        codes = value.hidden_states.view(torch.uint8) ^ 0x80
        return replace(value, hidden_states=codes.view(torch.float8_e4m3fn))

    deviations = _judged_with(quantised, Stage.ACTIVATION, act)
    assert {(one.stage, one.rank) for one in deviations} == {
        (Stage.ACTIVATION, quantised.last_rank)
    }


def _judged_with(clean, stage, act):
    """Deviations of a new forward in which one rank's stage is wrong and every later one right."""
    fault = Fault(
        name="in_flight",
        kind=FaultKind.VALUE,
        stage=stage,
        about="",
        origin="",
        params={},
        act=act,
    )
    armed = SimpleNamespace(
        name=fault.name, fault=fault, stage=stage, params={}, ranks=(clean.last_rank,)
    )
    with LoopbackRanks(clean.resolved.plan, [armed]) as world:
        reports = world.forward(deal(clean.batch, clean.resolved.plan.sync), timeout_s=60)
    judgement = Judge(clean.resolved.judged).judge(
        clean.batch,
        [report.trace for report in reports],
        [report.calls for report in reports],
    )
    return judgement.ledger.deviations

"""Exact mode of traces that nobody's ranks of ours left, whole and in part."""

from functools import cache

import pytest

from moe.arithmetic import AccumulatorWidths
from moe.formats import Stage
from reports.verdict.captured_judge import CapturedJudge, tokens_of
from reports.verdict.exact_compared import EXACT
from tests.verdict.captured_runs import SUBSETS, kept
from tests.verdict.exact_runs import exact_deviations, exact_run

UNKNOWN = {
    "tail": "glue_in/own was not captured",
    "dispatch to combine": "glue_in/own was not captured",
    "no routes": "a certificate takes both route/topk_ids and dispatch/physical_ids",
}
KEEPS = {
    **SUBSETS,
    "whole": lambda stage, name: True,
    "no routes": lambda stage, name: stage is Stage.GLUE_IN,
    "no partials": lambda stage, name: stage is not Stage.POST_PERMUTE,
}


@cache
def judged(keeps, name=None):
    """The judgement of a captured run, with one tensor of rank 0 negated."""
    run = exact_run("ue8m0")
    traces = run.traces
    if name is not None:
        traces = run.changed(*name[:1], 0, {name[1]: -run.tensor(name[0], 0, name[1])})
    traces = kept(traces, KEEPS[keeps])
    layer = run.resolved.judged
    return CapturedJudge(layer).judge_captured(tokens_of(layer, traces, run.batch), traces)


@pytest.mark.parametrize("keeps", ["whole", "all but weights", "no partials"])
def test_a_captured_trace_is_certified_and_compared(keeps):
    judgement = judged(keeps)
    assert judgement.certificate.output.certified >= 0.95
    assert EXACT in judgement.ledger.asked
    assert exact_deviations(judgement) == []


def test_what_was_not_captured_is_left_out_of_the_comparison():
    judgement = judged("no partials")
    assert Stage.POST_PERMUTE not in judgement.certificate.stages
    (left_out,) = [one for one in judgement.ledger.not_asked if one.check == EXACT]
    assert (left_out.what, left_out.why) == (
        "post_permute",
        "post_permute/partial was not captured",
    )


def test_a_wrong_certified_cell_of_a_captured_trace_is_found():
    (one,) = exact_deviations(judged("whole", (Stage.GEMM1, "gate_up")))
    assert (one.stage, one.rank) == (Stage.GEMM1, 0)


@pytest.mark.parametrize("keeps", UNKNOWN)
def test_what_a_certificate_lacks_is_named(keeps):
    judgement = judged(keeps)
    assert judgement.certificate is None
    reasons = [one.why for one in judgement.ledger.not_asked if one.check == EXACT]
    assert any(reason.startswith(UNKNOWN[keeps]) for reason in reasons)


def test_widths_of_a_backend_that_cannot_be_asked_are_its_declaration():
    arithmetic = exact_run("ue8m0").resolved.judged.arithmetic
    assert AccumulatorWidths.declared_by(arithmetic) == AccumulatorWidths(
        in_block=24, across_blocks=24, is_measured=False
    )

"""A trace in part: what is there is judged by its own input, what is not there is said."""

import pytest
import torch

from moe.formats import Stage
from reports.verdict.captured import CapturedTensors, NotCapturedError, where_captured
from reports.verdict.compared import BAND
from reports.verdict.deviation import NotAsked
from reports.verdict.ledger import Ledger
from tests.verdict.captured_runs import (
    EXPERTS,
    SUBSETS,
    judged_alone,
    judged_stages,
    kept,
    replaced,
)

BEHIND_ROUTES = {Stage.DISPATCH, Stage.PRE_PERMUTE, *EXPERTS, Stage.POST_PERMUTE, Stage.COMBINE}
JUDGED = {
    "dispatch to combine": BEHIND_ROUTES,
    "experts": set(EXPERTS),
    "route": {Stage.ROUTE},
    "tail": {Stage.TAIL, Stage.GLUE_OUT},
    "all but weights": set(Stage) - {Stage.WEIGHTS},
}
SPOILED = {
    "dispatch to combine": (Stage.COMBINE, "routed"),
    "experts": (Stage.GEMM1, "gate_up"),
    "route": (Stage.ROUTE, "topk_weights"),
    "tail": (Stage.TAIL, "shared.output"),
    "all but weights": (Stage.GEMM2, "output"),
}
EVERY_SUBSET = pytest.mark.parametrize("subset", SUBSETS)


@EVERY_SUBSET
def test_the_stages_of_a_subset_are_judged_and_no_others(clean, subset):
    judgement = judged_alone(clean, kept(clean.traces, SUBSETS[subset]))
    assert judged_stages(judgement) == JUDGED[subset]


@EVERY_SUBSET
def test_a_clean_subset_has_no_deviation(clean, subset):
    judgement = judged_alone(clean, kept(clean.traces, SUBSETS[subset]))
    assert judgement.ledger.deviations == []


@EVERY_SUBSET
def test_a_spoiled_tensor_of_a_subset_is_objected_to_at_its_stage(clean, subset):
    stage, name = SPOILED[subset]
    tensor = clean.tensor(stage, 0, name).clone()
    tensor[tensor.isfinite()] *= 1.1
    traces = replaced(clean.traces, 0, stage, name, tensor)
    first = judged_alone(clean, kept(traces, SUBSETS[subset])).ledger.deviations[0]
    assert (first.stage, first.rank, first.tensor) == (stage, 0, name)


@EVERY_SUBSET
def test_every_part_that_was_left_out_names_the_tensor_that_it_lacks(clean, subset):
    traces = kept(clean.traces, SUBSETS[subset])
    captured = {(stage, name) for stage in Stage for name in traces[0].stages[stage]}
    left_out = judged_alone(clean, traces).ledger.not_asked
    lacks = {part.why.removesuffix(" was not captured") for part in left_out}
    lacks.remove("a trace holds no collectives")
    assert lacks
    assert not lacks & {f"{stage}/{name}" for stage, name in captured}


def test_a_whole_trace_is_judged_as_the_run_was(clean):
    judgement = judged_alone(clean, clean.traces)
    assert judgement.ledger.worst == clean.judged().worst
    assert {part.what for part in judgement.ledger.not_asked} == {"calls and bytes"}


def test_a_whole_trace_is_compared_with_the_goldens_from_end_to_end(clean):
    judgement = judged_alone(clean, clean.traces)
    assert judgement.end_to_end.distances.keys() >= {Stage.ROUTE, *EXPERTS, Stage.GLUE_OUT}
    assert judgement.same_recipe.output.shape[0] == sum(clean.resolved.judged.tokens)


def test_without_tokens_nothing_is_compared_from_end_to_end(clean):
    judgement = judged_alone(clean, kept(clean.traces, SUBSETS["tail"]))
    assert judgement.end_to_end.distances == {}
    assert judgement.same_recipe.output.shape[0] == 0


def test_experts_are_named_where_no_token_is_known(clean):
    rank = clean.last_rank
    row = clean.route(rank).row
    tensor = clean.tensor(Stage.GEMM2, rank, "output").clone()
    tensor[row] = 1e4
    traces = replaced(clean.traces, rank, Stage.GEMM2, "output", tensor)
    first = judged_alone(clean, kept(traces, SUBSETS["experts"])).ledger.deviations[0]
    assert (first.token, first.slot) == (None, None)
    assert first.expert == clean.route(rank).expert


def test_a_tensor_that_is_not_there_is_not_captured():
    tensors = CapturedTensors(Stage.ROUTE, {"logits": torch.zeros(1)})
    with pytest.raises(NotCapturedError, match=r"route/topk_ids was not captured"):
        tensors["topk_ids"]


def test_what_is_left_out_is_entered_once_for_each_check():
    ledger, tensors = Ledger(), CapturedTensors(Stage.ROUTE, {})
    for _ in range(2):
        with where_captured(ledger, Stage.GEMM1, BAND, "accounts"):
            tensors["logits"]
    why = "route/logits was not captured"
    assert ledger.not_asked == [
        NotAsked(check=BAND, what="gemm1", why=why),
        NotAsked(check="accounts", what="gemm1", why=why),
    ]


def test_another_error_is_not_taken_for_something_left_out():
    with pytest.raises(KeyError), where_captured(Ledger(), Stage.GEMM1, BAND):
        raise KeyError("logits")

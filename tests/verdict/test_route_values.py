"""Routes in parts: the same rows, the same verdict, and nothing kept that is large."""

import pytest
import torch

from moe.formats import Stage
from reports.verdict import route_values
from reports.verdict.judge import Judge
from reports.verdict.subject import Subject
from reports.verdict.weights import StreamedWeights


@pytest.fixture
def in_small_parts(monkeypatch):
    monkeypatch.setattr(route_values, "CELLS_AT_ONCE", 1)


def subject_of(run):
    return Subject(run.resolved.judged, run.view, run.batch, run.traces)


def test_few_routes_are_one_part(clean_ue8m0):
    assert len(subject_of(clean_ue8m0).route_parts) == 1


@pytest.mark.usefixtures("in_small_parts")
def test_many_routes_are_a_part_a_rank(clean_ue8m0):
    subject = subject_of(clean_ue8m0)
    parts = subject.route_parts
    assert len(parts) == len(clean_ue8m0.traces)
    assert torch.equal(torch.cat([part.rows.token for part in parts]), subject.route_rows.token)


@pytest.mark.usefixtures("in_small_parts")
def test_parts_have_the_rows_of_the_whole(clean_ue8m0):
    subject = subject_of(clean_ue8m0)
    whole = subject.route_values(Stage.ACTIVATION, "hidden_states")
    parts = [part.values(Stage.ACTIVATION, "hidden_states") for part in subject.route_parts]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("in_small_parts")
def test_parts_find_what_the_whole_finds(clean_ue8m0):
    rank = clean_ue8m0.last_rank
    row = clean_ue8m0.route(rank).row
    tensor = clean_ue8m0.tensor(Stage.GEMM2, rank, "output").clone()
    tensor[row] *= 2
    traces = clean_ue8m0.changed(Stage.GEMM2, rank, {"output": tensor})
    judge = Judge(clean_ue8m0.resolved.judged)
    first = judge.check(clean_ue8m0.batch, traces, clean_ue8m0.calls).deviations[0]
    assert (first.stage, first.rank, first.token) == (
        Stage.GEMM2,
        rank,
        clean_ue8m0.route(rank).token,
    )


def test_parts_measure_the_distances_of_the_whole(clean_ue8m0, monkeypatch):
    run = clean_ue8m0
    judge = Judge(run.resolved.judged)
    whole = judge.judge(run.batch, run.traces, run.calls)
    monkeypatch.setattr(route_values, "CELLS_AT_ONCE", 1)
    parts = judge.judge(run.batch, run.traces, run.calls)
    assert parts.end_to_end.worst_row == whole.end_to_end.worst_row
    assert parts.ledger.worst == whole.ledger.worst
    for stage, distance in whole.end_to_end.distances.items():
        found = parts.end_to_end.distances[stage]
        assert found.run_to_same_recipe == pytest.approx(distance.run_to_same_recipe, rel=1e-12)
        assert found.same_recipe_to_ideal == pytest.approx(distance.same_recipe_to_ideal, rel=1e-12)


def streamed(num_experts, asked, shared=lambda: None):
    def expert(index):
        asked.append(index)
        return torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)

    gate = torch.zeros(num_experts, 2)
    return StreamedWeights(gate, None, None, 2, expert, shared)


def test_experts_that_all_fit_are_decoded_once():
    asked = []
    weights = streamed(2, asked)
    for index in (0, 1, 0, 1):
        weights.expert(index)
    assert asked == [0, 1]


def test_experts_of_a_layer_that_does_not_fit_are_not_hoarded(monkeypatch):
    monkeypatch.setattr("reports.verdict.weights.CACHED_BYTES", 100)  # each pair has 64 bytes
    asked = []
    weights = streamed(2, asked)
    for index in (0, 1, 0, 1):
        weights.expert(index)
    assert asked == [0, 1, 0, 1]


@pytest.mark.parametrize("cached", [100, 200], ids=["no room", "room"])
@pytest.mark.parametrize("value", [1.5, 1.0 + 2.0**-30], ids=["bf16", "float64"])
def test_the_shared_expert_is_read_once_and_handed_out_in_float64(cached, value, monkeypatch):
    monkeypatch.setattr("reports.verdict.weights.CACHED_BYTES", cached)
    asked = []

    def shared():
        asked.append("shared")
        return (torch.full((2, 2), value, dtype=torch.float64),) * 2

    weights = streamed(2, [], shared)
    for w13, w2 in (weights.shared(), weights.shared()):
        assert w13.dtype is w2.dtype is torch.float64
        assert float(w13[0, 0]) == float(w2[0, 0]) == value
    assert asked == ["shared"]

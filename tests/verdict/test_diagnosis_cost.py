"""What a diagnosis costs at most: findings beyond a number of cells have none, and say so."""

import torch

from moe.formats import Stage
from reports.verdict.diagnosis import hypotheses
from reports.verdict.judge import Judge
from reports.verdict.ledger import Ledger
from reports.verdict.stage_weights import JudgedWeights

RANK = 1
MATRIX = "experts.w13.values"


def all_slots_rolled(run):
    """Traces in which every slot of a rank holds the next one's w13, codes and scales."""
    held = run.traces[RANK][Stage.WEIGHTS]
    names = [name for name in (MATRIX, "experts.w13.scale") if name in held]
    changed = {}
    for name in names:
        copy = torch.empty_strided(held[name].shape, held[name].stride(), dtype=held[name].dtype)
        order = torch.arange(len(copy)).roll(-1)
        cells = held[name].view(torch.uint8) if copy.element_size() == 1 else held[name]
        (copy.view(torch.uint8) if copy.element_size() == 1 else copy).copy_(cells[order])
        changed[name] = copy
    return run.changed(Stage.WEIGHTS, RANK, changed)


def diagnosed(run, traces):
    """Every deviation of the weights with its diagnosis, in the order of blame."""
    judge = Judge(run.resolved.judged)
    ledger = run.judged(traces, judge=judge)
    found = judge.diagnose(run.batch, traces, ledger)
    return [found[one] for one in ledger.deviations if one.stage is Stage.WEIGHTS]


def test_findings_beyond_so_many_cells_are_not_diagnosed_and_say_so(clean_ue8m0, monkeypatch):
    monkeypatch.setattr(hypotheses, "CELLS", 1)
    first, *others = diagnosed(clean_ue8m0, all_slots_rolled(clean_ue8m0))
    assert first.mistake == "wrong_expert"
    assert others
    assert {(one.mistake, one.words) for one in others} == {(None, hypotheses.LEFT_OUT)}


def test_findings_within_it_are_all_diagnosed(clean_ue8m0):
    found = diagnosed(clean_ue8m0, all_slots_rolled(clean_ue8m0))
    assert {one.mistake for one in found} == {"wrong_expert"}


def test_an_expert_is_recognised_without_a_preparation_of_all(clean_ue8m0, monkeypatch):
    monkeypatch.setattr("reports.verdict.weights.CACHED_BYTES", 0)
    run, read = clean_ue8m0, []
    judge, traces = Judge(run.resolved.judged), all_slots_rolled(clean_ue8m0)
    ledger = run.judged(traces, judge=judge)
    source = type(run.resolved.judged.weights)
    original = source.experts

    def counted(self, experts):
        read.extend(experts)
        return original(self, experts)

    monkeypatch.setattr(source, "experts", counted)
    judge.diagnose(run.batch, traces, ledger)
    assert sorted(read) == sorted(run.resolved.judged.local_experts(RANK))


def test_first_rows_of_experts_are_those_of_their_preparation(clean):
    weights = JudgedWeights(clean.resolved.judged, clean.traces, Ledger())
    for local, expert in enumerate(clean.resolved.judged.local_experts(RANK)):
        for matrix, whole in enumerate(weights.expert(RANK, local)):
            assert torch.equal(weights.first_row(RANK, expert, matrix), whole[0])
            assert torch.equal(weights.first_row_held(RANK, local, matrix), whole[0])

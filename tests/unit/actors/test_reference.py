"""The simplest other topology keeps its ranks from one question to the next."""

from dataclasses import replace

import pytest

from actors import reference
from actors.reference import SimplestOther
from actors.resolve import resolve
from actors.world import LoopbackRanks
from reports.verdict.judge import Judge
from scenarios.batches import batch_of
from scenarios.inputs import deal


@pytest.fixture
def subject_of(load):
    """``subject_of()``: the same ranks' next forward."""
    layer, batch = resolve(load()).layers["random"], batch_of(load(), "random")
    judge, ranks = Judge(layer.judged), LoopbackRanks(layer.plan)

    def forward():
        reports = ranks.forward(deal(batch, layer.plan.sync), timeout_s=60)
        return judge.subject(batch, [one.trace for one in reports])

    return forward


@pytest.fixture
def joins(monkeypatch):
    """Grows by one whenever weights are joined."""
    made, join = [], reference.joined_weights

    def counted(*given):
        made.append(given)
        return join(*given)

    monkeypatch.setattr(reference, "joined_weights", counted)
    return made


def test_weights_are_joined_once_for_living_ranks(load, subject_of, joins):
    other = SimplestOther(load())
    _, there = other.found
    first, again = (other.forward(there, "random", subject_of()) for _ in range(2))
    assert len(joins) == 1
    assert first.output.equal(again.output)


def test_other_weights_are_joined_again(load, subject_of, joins):
    other, subject = SimplestOther(load()), subject_of()
    _, there = other.found
    other.forward(there, "random", subject)
    subject.traces = [replace(one, stages=_anew(one.stages)) for one in subject.traces]
    other.forward(there, "random", subject)
    assert len(joins) == 2


def _anew(stages):
    return {stage: dict(named) for stage, named in stages.items()}

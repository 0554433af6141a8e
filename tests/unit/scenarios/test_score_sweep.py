"""The list of scenarios behind the mutation score: how many, and what they cover."""

from pathlib import Path

import pytest

from moe.formats import DispatchFormat, Platform, QuantRecipe
from scenarios.parallel import sync_of
from scenarios.sweep import load_path
from topology.sync import Gather, Reducer, Return

SWEEP = Path(__file__).parents[3] / "scenarios" / "sweeps" / "score.yaml"


@pytest.fixture(scope="module")
def cases():
    expanded = load_path(SWEEP)
    assert expanded.refusals() == []
    return [loaded for _, loaded in expanded.legal]


def test_there_are_at_most_forty(cases):
    assert len(cases) <= 40


@pytest.mark.parametrize(
    ("read", "wanted"),
    [
        (lambda one: one.scenario.moe.dispatcher, set(DispatchFormat)),
        (lambda one: one.scenario.moe.recipe, set(QuantRecipe)),
        (lambda one: one.scenario.platform, set(Platform)),
        (lambda one: sync_of(one.scenario).gather, set(Gather)),
        (lambda one: sync_of(one.scenario).returning, set(Return)),
        (lambda one: sync_of(one.scenario).reducer, set(Reducer)),
        (lambda one: one.scenario.run.rounds > 2, {True, False}),
        (lambda one: one.scenario.moe.placement, {"contiguous", "shuffled"}),
    ],
    ids=["dispatcher", "recipe", "platform", "gather", "return", "reducer", "rounds", "placement"],
)
def test_they_cover_every(cases, read, wanted):
    assert {read(one) for one in cases} == wanted

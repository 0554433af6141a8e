"""Groups whose largest value is tiny: low-latency wires scale them for 1e-4, others for 1e-10."""

from dataclasses import replace

import pytest

from actors.resolve import resolve
from actors.world import LoopbackRanks
from moe.dispatch import low_latency
from moe.formats import Stage
from reports.verdict.judge import Judge
from scenarios.batches import batch_of
from scenarios.inputs import deal
from tests.mutation.worlds import load

TINY = 2.0**-24
"""Brings a normal token's groups to about 2e-7."""


def deviations(platform: str):
    """What the verdict enters of tokens whose first group is tiny."""
    loaded = load("slabs ll", sets=(f"platform={platform}",))
    resolved = resolve(loaded)
    batch = batch_of(loaded, "random")
    rows = batch.hidden_states.clone()
    rows[:, :128] *= TINY
    batch = replace(batch, hidden_states=rows)
    with LoopbackRanks(resolved.plan) as world:
        reports = world.forward(deal(batch, resolved.plan.sync, resolved.plan.seed), 60.0)
    traces, calls = [r.trace for r in reports], [r.calls for r in reports]
    return Judge(resolved.judged).check(batch, traces, calls).deviations


@pytest.mark.parametrize("platform", ["sm90", "sm100"])
def test_tiny_groups_agree(platform):
    assert deviations(platform) == []


@pytest.mark.parametrize("platform", ["sm90", "sm100"])
def test_the_floor_of_the_other_quantiser_is_found_on_the_wire(platform, monkeypatch):
    monkeypatch.setattr(low_latency, "LOW_LATENCY_AMAX_FLOOR", 1e-10)
    found = deviations(platform)
    assert {one.stage for one in found} == {Stage.DISPATCH}
    assert any("quantiser" in one.check for one in found)

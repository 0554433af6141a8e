"""Ranks that hold the same rows owe the same answers, though each may be legal by itself."""

import itertools
from dataclasses import replace

import pytest
import torch

from actors.driver import run_scenario
from moe.formats import Stage
from moe.placement import ExpertPlacement
from moe.stages import PhysicalIds
from reports.verdict.plan_check import check_plan
from reports.verdict.readable import UnreadableTraceError
from scenarios.loader import load_scenario
from topology.sync import PADDING

GATHERED = "scenarios/topologies/dp_ep_reduce_scatter.yaml"
NARROW = "model.overrides.hidden_size=128"


def test_replicas_chosen_rank_by_rank_lose_and_double_routes(monkeypatch):
    plain, calls = ExpertPlacement.to_physical, itertools.count()

    def by_call(self, topk_ids):
        """Every second rank sees its rows one further down, and so takes the next replica."""
        rows_before = topk_ids[: next(calls) % 2]
        return PhysicalIds(plain(self, torch.cat([rows_before, topk_ids]))[len(rows_before) :])

    monkeypatch.setattr(ExpertPlacement, "to_physical", by_call)
    settings = (
        "run.runtime=loopback",
        "inputs.modes=[random]",
        "moe.redundant_experts=16",
        "moe.placement=shuffled",
        NARROW,
    )
    loaded = load_scenario(GATHERED, overrides=settings)
    result = run_scenario(loaded, asks=False).result
    first = result.first_divergence
    assert (first.stage, first.tensor) == (Stage.DISPATCH, "physical_ids")
    assert {f.check for f in result.findings if f.tensor == "physical_ids"} == {"accounts"}


def test_a_reduced_row_that_differs_by_one_place_from_its_peers_is_found(clean_layout, last_places):
    run = clean_layout("dp_tp_all_reduce")
    spoiled = last_places(run.tensor(Stage.TAIL, 1, "reduced"), 0, 0, 1)
    found = run.judged(run.changed(Stage.TAIL, 1, {"reduced": spoiled})).deviations
    assert any((d.check, d.rank, d.tensor) == ("contract: moves", 1, "reduced") for d in found)


@pytest.mark.parametrize("routing", ["{kind: balanced, weights: router}", "{kind: dropped}"])
def test_pinned_routes_of_a_hash_layer_have_the_weights_of_their_own_experts(routing):
    settings = ("run.runtime=loopback", f"batch.routing={routing}", NARROW)
    scenario = load_scenario("scenarios/topologies/hash_dp.yaml", overrides=settings)
    assert run_scenario(scenario, asks=False).result.verdict == "agree"


@pytest.mark.parametrize("field", ["entry", "layer"])
def test_a_plan_that_loses_a_token_cannot_be_judged(clean_layout, field):
    layer = clean_layout("dp_tp_all_reduce").resolved.judged
    rows = getattr(layer.sync, field)
    without = tuple(tuple(PADDING if token == 2 else token for token in row) for row in rows)
    broken = replace(layer, sync=replace(layer.sync, **{field: without}))
    with pytest.raises(UnreadableTraceError, match=r"token 2 .* 0 times, 1 is due"):
        check_plan(broken)

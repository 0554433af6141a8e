"""Exact inputs: certified cells are equal in every topology, dispatcher and layout."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from actors.driver import run_scenario
from scenarios.loader import LoadedScenario, load_scenario
from tests.property.test_topologies_compared import TOPOLOGIES, loaded

EXACT = "inputs.modes=[exact]"
RECIPES = {
    "fp8_block128 sm90": ("moe.recipe=fp8_block128", "platform=sm90"),
    "fp8_block128 sm100": ("moe.recipe=fp8_block128", "platform=sm100"),
    "bf16": ("moe.recipe=bf16", "platform=sm90"),
    "mxfp8": ("moe.recipe=mxfp8", "platform=sm100"),
    "mxfp4_w4a8": ("moe.recipe=mxfp4_w4a8", "platform=sm100"),
    "mxfp4_as_fp8": ("moe.recipe=mxfp4_as_fp8", "platform=sm90"),
}
HARDEST = "fp8_block128 sm90"
"""Its scales have mantissas, so what is certain is so by its stores."""

DISPATCHERS = {
    "standard segments": ("moe.dispatcher=standard", "moe.layout=compact"),
    "standard slabs": ("moe.dispatcher=standard", "moe.layout=masked"),
    "flashinfer": ("moe.dispatcher=flashinfer",),
    "deepep_normal": ("moe.dispatcher=deepep_normal",),
    "deepep_ll": ("moe.dispatcher=deepep_ll", "batch.phase=decode"),
    "deepep_v2": ("moe.dispatcher=deepep_v2",),
    "deepep_v2 expanded": ("moe.dispatcher=deepep_v2", "batch.phase=decode"),
}
WORLDS = {1: "[29]", 2: "[20, 9]", 4: "[5, 8, 0, 16]", 8: "[5, 0, 7, 1, 3, 8, 1, 4]"}
SMALL = (
    "run.runtime=loopback",
    EXACT,
    "allow_unsupported=true",
    "moe.shared_experts=replicated",
    "model.overrides={hidden_size: 256, moe_intermediate_size: 256, n_routed_experts: 8}",
)


@dataclass(frozen=True)
class Certified:
    """Output [T, H] and its certified cells [T, H] bool."""

    output: Tensor
    cells: Tensor


def certified(scenario: LoadedScenario) -> Certified:
    outcome = run_scenario(scenario, asks=False)
    assert outcome.result.verdict == "agree", outcome.result.summary
    (run,) = outcome.runs
    assert run.judgement.certificate.refusal is None
    return Certified(run.judgement.output, run.judgement.certificate.output_cells)


def assert_equal(one: Certified, other: Certified) -> None:
    both = one.cells & other.cells
    assert both.double().mean() >= 0.9
    assert torch.equal(one.output[both], other.output[both])


@cache
def on_topology(topology: str) -> Certified:
    return certified(loaded(topology, EXACT, *RECIPES[HARDEST]))


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "dp_ep_a2a"])
def test_topologies_give_equal_bits(topology):
    assert_equal(on_topology("dp_ep_a2a"), on_topology(topology))


@cache
def in_world(world: int, dispatcher: str, recipe: str) -> Certified:
    settings = (
        *SMALL,
        f"parallel={{world_size: {world}, attention: {{dp: {world}}}, moe: {{ep: {world}}}}}",
        f"batch.tokens={WORLDS[world]}",
        *DISPATCHERS[dispatcher],
        *RECIPES[recipe],
    )
    return certified(load_scenario("scenarios/topologies/dp_ep_a2a.yaml", overrides=settings))


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_rank_and_eight_give_equal_bits(recipe):
    assert_equal(in_world(1, "deepep_normal", recipe), in_world(8, "deepep_normal", recipe))


@pytest.mark.parametrize("world", [2, 4])
def test_one_rank_and_some_give_equal_bits(world):
    assert_equal(in_world(1, "deepep_normal", HARDEST), in_world(world, "deepep_normal", HARDEST))


@pytest.mark.parametrize("dispatcher", [name for name in DISPATCHERS if name != "deepep_normal"])
def test_dispatchers_and_layouts_give_equal_bits(dispatcher):
    assert_equal(in_world(4, "deepep_normal", HARDEST), in_world(4, dispatcher, HARDEST))

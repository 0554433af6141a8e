"""Runs without a fault are silent, whatever the seed and however the tokens are dealt."""

import pytest

from actors.driver import run_scenario
from scenarios.loader import load_scenario
from tests.mutation.worlds import WORLDS, outcome

SMOKE = "scenarios/smoke/ep2_dp.yaml"
RECIPES = {
    "ue8m0": ("platform=sm100",),
    "fp32": ("platform=sm90",),
    "bf16": ("moe.recipe=bf16",),
}
TOKENS = {
    "equal": [4, 4, 4, 4],
    "uneven": [1, 9, 0, 4],
    "all but one empty": [0, 0, 7, 0],
    "one token": [0, 1, 0, 0],
    "all empty": [0, 0, 0, 0],
}
FOUR_RANKS = ("parallel.world_size=4", "parallel.attention.dp=4", "parallel.moe.ep=4")


def run(*settings):
    loaded = load_scenario(SMOKE, overrides=("run.runtime=loopback", *settings))
    return run_scenario(loaded).result


def recipe_of(seed):
    return list(RECIPES)[seed % len(RECIPES)]


@pytest.mark.parametrize("seed", range(30), ids=lambda seed: f"{seed}-{recipe_of(seed)}")
def test_no_seed_gives_a_finding(seed):
    result = run(*RECIPES[recipe_of(seed)], f"inputs.seed={seed}")
    assert (result.verdict, result.findings) == ("agree", ())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_no_way_of_dealing_tokens_gives_a_finding(recipe, tokens):
    settings = (*RECIPES[recipe], *FOUR_RANKS, f"batch.tokens={TOKENS[tokens]}")
    result = run(*settings)
    assert (result.verdict, result.findings) == ("agree", ())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_no_number_of_experts_a_token_gives_a_finding(recipe, top_k):
    result = run(*RECIPES[recipe], f"model.overrides.num_experts_per_tok={top_k}")
    assert (result.verdict, result.findings) == ("agree", ())


@pytest.mark.parametrize("world", WORLDS)
def test_no_world_that_faults_are_let_loose_on_gives_a_finding(world):
    result = outcome(world).result
    assert (result.verdict, result.findings) == ("agree", ())

"""Scenarios that fail are shrunk to the smallest that fail in the same way."""

from functools import cache

import pytest

import run
from actors.driver import run_scenario
from actors.shrink import CannotShrinkError, Limits, Shrunk, shrink
from reports.failure import Failure, failure_of
from reports.result import Verdict
from scenarios.loader import LoadedScenario
from tests.mutation.worlds import load


def failing(fault: str) -> tuple[LoadedScenario, Failure]:
    loaded = load("a2a", fault, sets=("model.overrides.hidden_size=128",))
    failure = failure_of(run_scenario(loaded, asks=False).result)
    assert failure is not None
    return loaded, failure


@cache
def found(fault: str, candidates: int = 60, seconds: float = 60) -> tuple[Shrunk, list[str]]:
    lines: list[str] = []
    limits = Limits(candidates=candidates, seconds=seconds)
    return shrink(*failing(fault), limits, lines.append), lines


def test_what_needs_two_tokens_keeps_two_on_one_rank():
    scenario = found("tokens_swapped:rank=3")[0].loaded.scenario
    assert (scenario.parallel.world_size, scenario.batch.tokens) == (1, (2,))


def test_a_fault_of_dispatch_needs_no_more_than_one_expert_in_bf16():
    loaded = found("tokens_swapped:rank=3")[0].loaded
    sizes = (loaded.model.n_routed_experts, loaded.model.num_experts_per_tok)
    assert (sizes, loaded.scenario.moe.recipe) == ((1, 1), "bf16")


def test_the_smallest_fails_as_the_first_did():
    shrunk, _ = found("tokens_swapped:rank=3")
    assert failure_of(run_scenario(shrunk.loaded).result) == shrunk.failure


def test_every_candidate_that_ran_is_told_in_a_line():
    shrunk, lines = found("tokens_swapped:rank=3")
    assert len(lines) == shrunk.tried
    assert sum(" yes " in line for line in lines) == len(shrunk.went) + 1


def test_a_limit_that_ends_the_search_is_named_and_what_was_found_stays():
    shrunk, _ = found("tokens_swapped:rank=3", candidates=2)
    assert shrunk.ended_by == "2 candidates"
    assert len(shrunk.went) == 1


def test_a_search_without_time_leaves_the_scenario_as_it_was():
    shrunk, _ = found("tokens_swapped:rank=3", seconds=0)
    assert (shrunk.ended_by, shrunk.went, shrunk.tried) == ("0 s", (), 1)


def test_a_failure_that_does_not_come_again_is_not_shrunk():
    loaded, _ = failing("tokens_swapped:rank=3")
    other = Failure(verdict=Verdict.FAILED, cause="died")
    with pytest.raises(CannotShrinkError, match="now: discrepancy: stage dispatch"):
        shrink(loaded, other, Limits(candidates=9, seconds=60), print)


def test_the_command_leaves_a_capsule_that_the_command_line_replays(tmp_path, capsys):
    ran, capsule = str(tmp_path / "ran"), str(tmp_path / "capsule")
    smoke = "scenarios/smoke/ep2_dp.yaml"
    fault = ["--inject", "gate_up_swapped:rank=1", "--set", "model.overrides.hidden_size=128"]
    run.main([smoke, "--runtime", "loopback", *fault, "--out", ran, "--quiet"])
    assert run.main(["shrink", ran, "--out", capsule]) == 0
    assert run.main([capsule, "--out", str(tmp_path / "again"), "--quiet"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("; replay as the capsule holds it")

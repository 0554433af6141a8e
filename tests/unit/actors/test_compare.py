"""Two runs side by side: bug, noise or the same, and what cannot be compared."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from actors.by_mode import Keep
from actors.compare import NotComparableError, Run, compare_runs, load_runs
from actors.driver import run_scenario
from actors.judge_trace import judge_trace
from actors.output import write_outcome
from actors.sides import sides_of
from moe.formats import Stage
from reports.compare_result import compare_lines
from reports.verdict.side_by_side import distances
from scenarios.errors import UserError
from scenarios.loader import load_scenario

SMOKE = "scenarios/smoke/ep2_dp.yaml"
ONE_RANK = (
    "name=alone",
    "parallel={world_size: 1, attention: {dp: 1}, moe: {ep: 1}}",
    "batch.tokens=[8]",
)


@cache
def outcome(*sets, inject=()):
    loaded = load_scenario(SMOKE, overrides=("run.runtime=loopback", *sets), injects=inject)
    return loaded, run_scenario(loaded, keep=Keep(sides=True))


def run(*sets, inject=()):
    loaded, one = outcome(*sets, inject=inject)
    return Run(
        source=Path(SMOKE),
        result=one.result,
        sides=sides_of(loaded.scenario.name, one),
        tokens={forward.mode: forward.batch.hidden_states for forward in one.runs},
    )


def kept(folder, *sets, inject=()):
    """The same, written and read back."""
    folder.mkdir()
    write_outcome(outcome(*sets, inject=inject)[1], folder, with_tensors=True)
    return folder


def test_a_run_is_the_same_as_itself():
    result = compare_runs(run(), run())
    assert (result.same, result.checks) == (True, ())
    assert result.conclusion.startswith("same: ")


def test_other_roundings_are_noise_with_stage_and_reason():
    result = compare_runs(run(), run(*ONE_RANK))
    (mode,) = result.modes
    assert not result.same
    assert (mode.likeness, mode.stage, mode.declared) == ("rounding", "combine", "post_permute")
    assert result.conclusion.startswith("noise: both agree with their goldens; from post_permute")
    assert 0 < mode.one_from_golden < mode.apart < 0.01


def test_a_run_that_disagrees_is_a_bug_with_its_own_sentence():
    wrong = run("name=wrong", inject=("topk_weights_twice",))
    result = compare_runs(run(), wrong)
    assert result.conclusion == f"bug: wrong: {wrong.result.summary}"
    assert [(check.name, check.one, check.other) for check in result.checks] == [
        ("band", "agree", "discrepancy")
    ]
    assert result.modes[0].other_from_golden > 10 * result.modes[0].one_from_golden


def test_ranks_that_did_not_come_back_are_another_verdict_and_no_bits():
    result = compare_runs(run(), run("name=failed", inject=("rank_raises",)))
    assert (result.same, result.modes) == (False, ())
    assert next(compare_lines(result)) == "verdict: ep2_dp agree, failed failed"


def test_a_line_says_where_bits_differ_first_and_in_which_values():
    (mode,) = (result := compare_runs(run(), run(*ONE_RANK))).modes
    place = f"token {mode.token}, column {mode.column}"
    values = f"{mode.one_value:.6g} in ep2_dp, {mode.other_value:.6g} in alone"
    first = f"random: bits differ first in stage combine: routed, {place}: {values}"
    assert next(compare_lines(result)) == first


@pytest.mark.parametrize(
    ("sets", "reason"),
    [
        (("inputs.seed=8",), "inputs.seed: 7 and 8"),
        (("batch.tokens=[5, 4]",), "batch.tokens: 8 and 9 tokens in mode random"),
        (("model.overrides.num_experts_per_tok=2",), "model.num_experts_per_tok: "),
        (("batch.routing.kind=balanced",), "batch.routing: "),
    ],
    ids=["seed", "tokens", "model", "routing"],
)
def test_what_makes_runs_incomparable_is_said(sets, reason):
    with pytest.raises(NotComparableError, match="cannot be compared") as caught:
        compare_runs(run(), run(*sets))
    assert reason in str(caught.value)


def test_two_runs_without_output_cannot_be_compared():
    failed = run("name=failed", inject=("rank_raises",))
    with pytest.raises(NotComparableError, match="neither of them came to an output"):
        compare_runs(failed, failed)


def test_what_was_kept_of_two_runs_compares_as_the_runs_do(tmp_path):
    """A result keeps routes and output, so bits part there first."""
    folders = [kept(tmp_path / "a"), kept(tmp_path / "b", *ONE_RANK)]
    result = compare_runs(*load_runs(folders, (), None))
    (read,), (ran,) = result.modes, compare_runs(run(), run(*ONE_RANK)).modes
    assert read.stage is Stage.GLUE_OUT
    same = {"likeness", "cells", "num_cells", "apart", "one_from_golden", "declared", "reason"}
    assert read.model_dump(include=same) == ran.model_dump(include=same)


def test_a_result_and_a_scenario_are_compared(tmp_path):
    folder = kept(tmp_path / "a")
    runs = load_runs([folder / "result.json", Path(SMOKE)], ("run.runtime=loopback",), None)
    result = compare_runs(*runs)
    assert result.same
    assert [result.one.name, result.other.name] == ["ep2_dp (A)", "ep2_dp (B)"]


def test_without_tensors_no_bit_can_be_compared(tmp_path):
    folder = kept(tmp_path / "a")
    (folder / "tensors.safetensors").unlink()
    with pytest.raises(UserError, match="--save-tensors all"):
        load_runs([folder, folder], (), None)


def test_a_result_of_a_judged_trace_is_refused_without_advice_that_cannot_be_followed(tmp_path):
    write_outcome(outcome()[1], tmp_path, with_tensors=False, with_traces=True)
    judged = judge_trace(outcome()[0], tmp_path / "traces" / "random")
    (tmp_path / "judged").mkdir()
    write_outcome(judged, tmp_path / "judged", with_tensors=False)
    with pytest.raises(UserError, match="judged from a trace") as caught:
        load_runs([tmp_path / "judged", Path(SMOKE)], (), None)
    assert "compare takes scenarios" in str(caught.value)


def test_a_difference_from_a_golden_that_is_all_zero_is_infinite():
    one = run().sides["random"]
    output = one.forward.output
    nothing = torch.zeros(output.shape, dtype=torch.float64)
    assert distances(output, nothing, nothing).from_golden == math.inf


def test_a_sweep_is_no_side():
    paths = [Path("scenarios/sweeps/recipes.yaml"), Path(SMOKE)]
    with pytest.raises(UserError, match="is a sweep"):
        load_runs(paths, (), None)


def test_a_mode_of_equal_bits_has_a_line():
    lines = list(compare_lines(compare_runs(run(), run())))
    assert lines[0] == "random: every bit that both have kept is equal"


def test_overrides_of_results_are_refused(tmp_path):
    folder = kept(tmp_path / "a")
    with pytest.raises(UserError, match=r"inputs\.seed=3 cannot be set: .* are results"):
        load_runs([folder, folder], ("inputs.seed=3",), None)

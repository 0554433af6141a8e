"""A sweep that ends early leaves what it has, and says which rows it did not come to."""

import json
from types import SimpleNamespace

import pytest

from actors.session import Session
from actors.sweep import run_sweep, summary_line
from reports.result import Verdict
from reports.sweep_result import SweepResult
from scenarios.errors import InputError, UserError
from scenarios.sweep import load_path

SWEEP = """\
sweep: seeds
about: three rows
base:
  model:
    preset: deepseek_v4
    overrides: {hidden_size: 256, moe_intermediate_size: 256, n_routed_experts: 8}
  parallel: {world_size: 2, attention: {dp: 2}, moe: {ep: 2}}
  moe: {recipe: bf16, dispatcher: deepep_normal}
  platform: sm100
  batch: {phase: extend, tokens: [5, 0]}
  inputs: {modes: [random]}
axes:
  inputs.seed: [1, 2, 3]
"""
AGREES = SimpleNamespace(verdict=Verdict.AGREE, as_expected=True, summary="agree: all", ranks=[])


@pytest.fixture
def seeds(tmp_path):
    path = tmp_path / "seeds.yaml"
    path.write_text(SWEEP)
    return load_path(path)


@pytest.fixture
def ending(monkeypatch):
    """Have rows agree without being run, until the one with a seed ends the sweep."""

    def end(seed: int, how: BaseException) -> None:
        def run(self, loaded, folder, selects=()):
            if loaded.scenario.inputs.seed == seed:
                raise how
            return AGREES

        monkeypatch.setattr(Session, "run", run)

    return end


@pytest.mark.parametrize(
    "how", [KeyboardInterrupt(), UserError("x: no such file")], ids=["Ctrl-C", "wrong input"]
)
def test_a_sweep_that_ends_early_writes_the_rows_that_ran(seeds, ending, tmp_path, how):
    ending(2, how)
    with pytest.raises(type(how)):
        run_sweep(seeds, tmp_path, Session(), lambda line: None)
    text = (tmp_path / "sweep.json").read_text()
    found = json.loads(text)
    assert [row["name"] for row in found["rows"]] == ["1"]
    assert found["not_run"] == [
        {"name": "2", "values": {"inputs.seed": "2"}},
        {"name": "3", "values": {"inputs.seed": "3"}},
    ]
    assert (found["counts"]["agree"], found["counts"]["not_run"]) == (1, 2)
    assert SweepResult.model_validate_json(text).reproduce.endswith("seeds.yaml")


def test_a_row_counts_as_run_although_its_line_cannot_be_said(seeds, ending, tmp_path):
    def say(line: str) -> None:
        raise BrokenPipeError

    ending(0, KeyboardInterrupt())
    with pytest.raises(BrokenPipeError):
        run_sweep(seeds, tmp_path, Session(), say)
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert ([row["name"] for row in found["rows"]], len(found["not_run"])) == (["1"], 2)


def test_of_a_sweep_that_ends_by_itself_every_legal_row_has_run(seeds, ending, tmp_path):
    ending(0, KeyboardInterrupt())
    result = run_sweep(seeds, tmp_path, Session(), lambda line: None)
    assert (len(result.rows), result.not_run) == (3, ())
    assert "not run" not in summary_line(result)


def test_a_row_whose_input_does_not_fit_fails_and_the_others_run(seeds, ending, tmp_path):
    ending(2, InputError("too few experts"))
    result = run_sweep(seeds, tmp_path, Session(), [].append)
    assert [row.verdict for row in result.rows] == ["agree", "failed", "agree"]
    assert (result.rows[1].summary, result.rows[1].result) == ("failed: too few experts", None)


def test_a_resumed_sweep_runs_what_is_missing_and_comes_to_the_same(seeds, ending, tmp_path):
    ending(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run_sweep(seeds, tmp_path, Session(), lambda line: None)
    ending(0, KeyboardInterrupt())
    for name in ("1", "2"):
        (tmp_path / name / "result.json").touch()
    said = []
    resumed = run_sweep(seeds, tmp_path, Session(), said.append, resume=True)
    assert [line.split()[1] for line in said] == ["seeds/3"]
    assert without_times(resumed) == without_times(
        run_sweep(seeds, tmp_path, Session(), said.append)
    )


def without_times(result):
    found = result.model_dump(exclude={"seconds"})
    return found | {"rows": [{**row, "seconds": None} for row in found["rows"]]}

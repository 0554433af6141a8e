"""``run.py SWEEP.yaml``: its lines, exit codes and files; and a slice of the shipped sweep."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from actors.driver import run_scenario
from reports.sweep_result import SweepResult
from scenarios.sweep import load_path

pytestmark = pytest.mark.e2e

SWEEP = """\
sweep: small
about: two topologies of two ranks
base:
  model:
    preset: deepseek_v4
    overrides: {hidden_size: 256, moe_intermediate_size: 256, n_routed_experts: 8}
  parallel: {world_size: 2}
  moe: {recipe: bf16}
  platform: sm100
  batch: {phase: extend}
  inputs: {modes: [random], seed: 7}
  run: {runtime: loopback}
axes:
  topology:
    tp: {parallel.attention: {dp: 1, tp: 2}, parallel.moe: {ep: 1, tp: 2}, batch.tokens: [9]}
    dp: {parallel.attention: {dp: 2}, parallel.moe: {ep: 2}, batch.tokens: [5, 0]}
  moe.dispatcher: [standard, deepep_normal]
"""
LEGAL = ["tp+standard", "dp+standard", "dp+deepep_normal"]
REFUSED = "tp+deepep_normal"
SHIPPED = Path("scenarios/sweeps/dispatch_layout.yaml")
RECIPES = Path("scenarios/sweeps/recipes.yaml")


@pytest.fixture
def sweep(tmp_path):
    """Write the small sweep, with texts replaced."""

    def write(*changes: tuple[str, str]) -> Path:
        text = SWEEP
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return path

    return write


def recorded(out: Path) -> dict:
    return json.loads((out / "sweep.json").read_text())


def test_a_process_prints_a_line_a_row_and_leaves_the_files_of_each(sweep, tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "run.py", str(sweep()), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    *rows, summary, rule, example = done.stdout.splitlines()
    assert rows == [f"agree        small/{name}" for name in LEGAL]
    assert summary.startswith(
        "small: 3 agree, 0 discrepancy, 0 failed, 0 unsupported, 1 refused, 0 excluded; "
    )
    assert rule.startswith("  1 refused by all_to_all_needs_whole_experts [semantic: SGLang 0.5.21")
    assert example.startswith(f"    {REFUSED}: parallel.moe.tp: deepep_normal moves tokens")
    written = {path.name: {file.name for file in path.iterdir()} for path in out.glob("*/")}
    assert written.keys() == set(LEGAL)
    assert all(names == {"report.html", "result.json"} for names in written.values())


def test_sweep_json_has_every_row_with_its_values_and_what_became_of_it(called, sweep, tmp_path):
    called(sweep(), "--out", tmp_path / "out", "--quiet")
    found = recorded(tmp_path / "out")
    assert [row["name"] for row in found["rows"]] == LEGAL
    assert found["axes"] == {
        "topology": ["tp", "dp"],
        "moe.dispatcher": ["standard", "deepep_normal"],
    }
    for row in found["rows"]:
        result = json.loads((tmp_path / "out" / row["result"]).read_text())
        assert (row["verdict"], row["summary"]) == (result["verdict"], result["summary"])
        assert row["name"] == result["name"] == "+".join(row["values"].values())
    ((name, message),) = found["refused"][0]["rules"].items()
    assert found["refused"][0]["name"] == REFUSED
    assert (name, message) == (found["rules"][0]["name"], found["rules"][0]["message"])
    assert found["counts"] == {
        "agree": 3,
        "discrepancy": 0,
        "failed": 0,
        "unsupported": 0,
        "not_run": 0,
        "refused": 1,
        "excluded": 0,
    }


def test_sweep_json_reads_back_as_its_type(called, sweep, tmp_path):
    called(sweep(), "--out", tmp_path / "out", "--quiet")
    text = (tmp_path / "out" / "sweep.json").read_text()
    assert SweepResult.model_validate_json(text).model_dump(mode="json") == json.loads(text)


def test_the_command_to_reproduce_a_row_runs_it_alone(called, sweep, tmp_path):
    called(sweep(), "--inject", "tokens_swapped", "--out", tmp_path / "out", "--quiet")
    row = recorded(tmp_path / "out")["rows"][-1]
    first = json.loads((tmp_path / "out" / row["result"]).read_text())
    words = shlex.split(first["reproduce"])[2:]
    called(*words, "--out", tmp_path / "again", "--quiet")
    (alone,) = recorded(tmp_path / "again")["rows"]
    assert (alone["name"], alone["summary"]) == ("dp+deepep_normal", first["summary"])
    assert first["verdict"] == "discrepancy"


@pytest.mark.parametrize(
    ("changes", "arguments", "code"),
    [
        ((), (), 0),
        ((), ("--inject", "tokens_swapped"), 1),
        ((), ("--inject", "rank_raises"), 3),
        ((), ("--inject", "rank_raises", "--set", "expect=failed"), 0),
        ((), ("--set", "run.backends.gemm=deep_gemm"), 4),
        ((("[standard, deepep_normal]", "[standard, deepep]"),), (), 2),
        ((), ("--set", "topology=ep"), 2),
    ],
    ids=[
        "agree",
        "discrepancy",
        "failed",
        "expected failure",
        "unsupported",
        "wrong value",
        "wrong set",
    ],
)
def test_the_exit_code_is_that_of_the_rows(called, sweep, tmp_path, changes, arguments, code):
    got, _, err = called(sweep(*changes), *arguments, "--out", tmp_path / "out", "--quiet")
    assert got == code
    assert bool(err) is (code == 2)
    assert (tmp_path / "out").exists() is (code != 2)


def test_a_row_that_does_not_agree_says_what_is_wrong_and_what_was_expected(
    called, sweep, tmp_path
):
    _, out, _ = called(sweep(), "--inject", "tokens_swapped", "--out", tmp_path / "out", "--quiet")
    assert out.splitlines()[2].startswith("discrepancy  small/dp+deepep_normal: stage dispatch, ")
    assert out.splitlines()[2].endswith(" (expected: agree)")


def test_a_value_without_a_legal_row_is_warned_of(called, sweep, tmp_path):
    layout = ("recipe: bf16}", "recipe: bf16, layout: masked}")
    _, _, err = called(sweep(layout), "--out", tmp_path / "out")
    warning = "axes.moe.dispatcher: no legal row has deepep_normal"
    assert f"  warning: {warning}\n" in err
    assert recorded(tmp_path / "out")["warnings"] == [warning]


def test_a_dry_run_lists_rows_refusals_and_minutes(called, sweep, tmp_path, monkeypatch):
    monkeypatch.setattr("actors.session.run_scenario", None)
    code, out, _ = called(sweep(), "--dry-run", "--out", tmp_path / "out")
    lines = out.splitlines()
    assert code == 0
    assert [line.split(" (")[0] for line in lines[:3]] == [f"small/{n}: would run" for n in LEGAL]
    assert lines[3] == "small: 4 rows: 3 to run, 1 refused, 0 excluded"
    assert lines[4].startswith("  1 refused by all_to_all_needs_whole_experts ")
    assert lines[-1] == "expected: 0.0 minutes"
    assert not (tmp_path / "out").exists()


def test_a_folder_may_hold_scenarios_and_sweeps(called, sweep, written, tmp_path):
    sweep()
    written(tmp_path)
    out_dir = tmp_path / "out"
    code, out, _ = called(tmp_path, "--runtime", "loopback", "--out", out_dir, "--quiet")
    assert code == 0
    assert out.startswith("ep2_dp: agree: ")
    assert {path.parent.relative_to(out_dir).as_posix() for path in out_dir.rglob("*.json")} == {
        "ep2_dp",
        "small",
        *(f"small/{name}" for name in LEGAL),
    }


def test_list_names_the_shipped_sweep(called):
    _, out, _ = called("list", "scenarios/sweeps")
    assert str(SHIPPED) in out
    assert " of 672 rows" in out


def test_the_sweep_on_the_page_prints_what_the_page_says(called, tmp_path):
    page = Path("docs/sweeps.md").read_text()
    blocks = {
        kind: re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("yaml", "text")
    }
    path = tmp_path / "two_topologies.yaml"
    path.write_text(blocks["yaml"][0])
    _, out, _ = called(path, "--out", tmp_path / "out")
    assert re.sub(r"\d+ s$", "N s", out, flags=re.MULTILINE) == re.sub(
        r"\d+ s$", "N s", blocks["text"][-1], flags=re.MULTILINE
    )


def every(step: int, sweep: Path) -> list:
    """Rows of a shipped sweep, spread over all of its axes."""
    return load_path(sweep).legal[::step]


@pytest.mark.parametrize(
    "row", [*every(29, SHIPPED), *every(37, RECIPES)], ids=lambda row: row[0].name
)
def test_a_row_of_a_shipped_sweep_agrees(row):
    _, loaded = row
    result = run_scenario(loaded, asks=False).result
    assert (result.verdict, result.findings) == ("agree", ())

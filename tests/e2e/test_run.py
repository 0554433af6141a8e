"""``run.py`` as its users meet it: exit codes, what goes to which stream, what lies in the folder.

Most cases call ``run.main`` in this process; a few start it as a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from scenarios.sweep_file import holds_sweep

pytestmark = pytest.mark.e2e

SMOKE = "scenarios/smoke/ep2_dp.yaml"
LOOPBACK = ("--runtime", "loopback")
SCHEMA = json.loads(Path("reports/result.schema.json").read_text())
RIGHT = Path(SMOKE).read_text()


def started(*arguments, **environment):
    """``python run.py`` as a process."""
    return subprocess.run(
        [sys.executable, "run.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_process_that_agrees_exits_0_with_one_line_and_its_files(tmp_path):
    done = started(SMOKE, *LOOPBACK, "--out", tmp_path, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ep2_dp: agree: 2 ranks, 8 tokens; ")
    assert done.stdout.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "result.json"]
    jsonschema.validate(json.loads((tmp_path / "result.json").read_text()), SCHEMA)


def test_a_process_with_bad_usage_exits_2_without_a_traceback(tmp_path):
    done = started(SMOKE, "--out", tmp_path, "--runtime", "loopbak")
    assert (done.returncode, done.stdout) == (2, "")
    assert "loopbak" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_process_whose_rank_raises_exits_3_without_a_traceback(tmp_path):
    done = started(SMOKE, *LOOPBACK, "--out", tmp_path, "--inject", "rank_raises:stage=gemm2")
    assert done.returncode == 3
    assert done.stdout.startswith("ep2_dp: failed: rank 1 raised in stage gemm2 on ")
    assert done.stdout.count("\n") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "verdict"),
    [
        ((), 0, "agree"),
        (("--inject", "tokens_swapped"), 1, "discrepancy"),
        (
            (
                "--inject",
                "tokens_swapped",
                "--set",
                "expect={verdict: discrepancy, stage: dispatch}",
            ),
            0,
            "discrepancy",
        ),
        (
            ("--inject", "tokens_swapped", "--set", "expect={verdict: discrepancy, stage: gemm1}"),
            1,
            "discrepancy",
        ),
        (("--set", "expect=failed"), 1, "agree"),
        (("--inject", "rank_raises"), 3, "failed"),
        (("--inject", "rank_raises", "--set", "expect=failed"), 0, "failed"),
        (("--set", "run.backends.gemm=deep_gemm"), 4, "unsupported"),
        (("--set", "run.backends.gemm=deep_gemm", "--set", "expect=unsupported"), 0, "unsupported"),
        (("--inject", "rank_dies"), 4, "unsupported"),
    ],
    ids=[
        "agree",
        "discrepancy",
        "expected discrepancy",
        "discrepancy elsewhere",
        "failure that did not come",
        "failed",
        "expected failure",
        "unsupported",
        "expected unsupported",
        "process fault on loopback",
    ],
)
def test_the_exit_code_says_whether_the_verdict_was_expected(
    called, tmp_path, arguments, code, verdict
):
    got, out, _ = called(SMOKE, *LOOPBACK, *arguments, "--out", tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (got, result["verdict"], result["as_expected"]) == (code, verdict, code == 0)
    assert out.startswith(f"ep2_dp: {verdict}: ")
    jsonschema.validate(result, SCHEMA)


def test_a_verdict_that_was_not_expected_says_which_one_was(called, tmp_path):
    _, out, _ = called(SMOKE, *LOOPBACK, "--inject", "tokens_swapped", "--out", tmp_path, "--quiet")
    assert out.rstrip().endswith("(expected: agree)")


def test_progress_goes_to_stderr(called, tmp_path):
    _, out, err = called(SMOKE, *LOOPBACK, "--out", tmp_path)
    assert out.count("\n") == 1
    assert "report.html" in err


@pytest.mark.parametrize(
    ("save", "inject", "saved"),
    [
        ("failed", (), False),
        ("failed", ("--inject", "tokens_swapped"), True),
        ("all", (), True),
        ("none", ("--inject", "tokens_swapped"), False),
    ],
)
def test_tensors_are_saved_as_asked(called, tmp_path, save, inject, saved):
    called(SMOKE, *LOOPBACK, *inject, "--save-tensors", save, "--out", tmp_path)
    assert (tmp_path / "tensors.safetensors").exists() is saved


def test_a_dry_run_runs_nothing(called, tmp_path, monkeypatch):
    monkeypatch.setattr("actors.session.run_scenario", None)
    code, out, _ = called(SMOKE, *LOOPBACK, "--dry-run", "--out", tmp_path / "none")
    assert code == 0
    assert out.startswith("ep2_dp: would run (2 ranks, 8 tokens, modes random, loopback)")
    assert not (tmp_path / "none").exists()


def test_a_dry_run_names_what_would_be_unsupported(called):
    code, out, _ = called(SMOKE, *LOOPBACK, "--dry-run", "--set", "run.backends.gemm=deep_gemm")
    assert code == 0
    assert "ep2_dp: unsupported: " in out


def test_several_scenarios_get_a_line_and_a_folder_each(called, three, tmp_path):
    out_dir = tmp_path / "out"
    code, out, _ = called(three, *LOOPBACK, "--out", out_dir, "--quiet")
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()] == ["ep2_dp", "faulty", "later"]
    assert {path.parent.name for path in out_dir.glob("*/result.json")} == {
        "ep2_dp",
        "faulty",
        "later",
    }


def test_an_agreement_beats_an_unsupported_one(called, three, tmp_path):
    files = (three / "a.yaml", three / "c.yaml")
    assert called(*files, *LOOPBACK, "--out", tmp_path / "out")[0] == 0


def test_a_failure_beats_a_discrepancy(called, three, tmp_path, written):
    failing = written(three, ("name: ep2_dp", "name: dead\ninject: [rank_raises]"), name="d.yaml")
    code, _, _ = called(three / "b.yaml", failing, *LOOPBACK, "--out", tmp_path / "out")
    assert code == 3


def test_a_page_is_rendered_again_from_json_alone(called, tmp_path):
    called(SMOKE, *LOOPBACK, "--out", tmp_path)
    page = tmp_path / "report.html"
    first = page.read_text()
    page.unlink()
    code, out, _ = called("report", tmp_path)
    assert (code, out.strip()) == (0, str(page))
    assert page.read_text() == first


def test_a_report_of_no_result_is_refused(called, tmp_path):
    code, out, err = called("report", tmp_path / "result.json")
    assert (code, out) == (2, "")
    assert "result.json" in err


def test_a_bad_result_keeps_no_other_from_its_page(called, tmp_path):
    good, broken, absent = (tmp_path / name for name in ("good", "broken", "absent"))
    called(SMOKE, *LOOPBACK, "--out", good, "--quiet")
    page = (good / "report.html").read_text()
    (good / "report.html").unlink()
    broken.mkdir()
    (broken / "result.json").write_text("{}")
    code, out, err = called("report", absent, broken, good)
    assert (code, out) == (2, f"{good / 'report.html'}\n")
    assert err.index(str(absent)) < err.index(str(broken))
    assert (good / "report.html").read_text() == page


def test_list_names_scenarios_presets_dispatchers_and_recipes(called):
    code, out, _ = called("list")
    assert code == 0
    for name in (SMOKE, "deepseek_v4", "deepep_normal", "fp8_block128"):
        assert name in out


def test_list_faults_names_every_fault(called):
    from moe.faults import FAULTS

    code, out, _ = called("list", "--faults")
    assert code == 0
    assert {word.partition(":")[0] for word in out.split()} >= FAULTS.keys()


def test_the_printed_schema_accepts_the_shipped_scenarios(called):
    code, out, _ = called("schema")
    schema = json.loads(out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert code == 0
    files = [path for path in Path("scenarios").rglob("*.yaml") if not holds_sweep(path)]
    assert files
    for path in files:
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def test_the_printed_schema_refuses_an_unknown_key(called):
    schema = json.loads(called("schema")[1])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**yaml.safe_load(RIGHT), "platfrom": "sm100"}, schema)


def test_the_command_to_reproduce_gives_the_same_verdict(called, tmp_path):
    called(SMOKE, *LOOPBACK, "--inject", "tokens_swapped:rank=0", "--out", tmp_path)
    first = json.loads((tmp_path / "result.json").read_text())
    words = first["reproduce"].split()
    assert (Path(words[0]).name, words[1]) == ("python", "run.py")
    called(*words[2:], "--out", tmp_path)
    again = json.loads((tmp_path / "result.json").read_text())
    assert again["first_divergence"] == first["first_divergence"]
    assert again["reproduce"] == first["reproduce"]


def test_list_faults_prints_every_parameter_whole(called):
    from moe.faults import FAULTS

    words = {word.rstrip(",") for word in called("list", "--faults")[1].split()}
    for fault in FAULTS.values():
        assert {f"{name}={value}" for name, value in fault.params.items()} <= words, fault.name


def test_score_takes_the_faults_that_it_is_told(called, tmp_path):
    code, _out, _ = called("score", SMOKE, "--faults", "partial_dropped", "--out", tmp_path)
    pairs = json.loads((tmp_path / "score.json").read_text())["scenarios"][0]["pairs"]
    assert (code, list(pairs)) == (0, ["partial_dropped"])


def test_score_refuses_a_fault_that_does_not_exist(called, tmp_path):
    code, _, err = called("score", SMOKE, "--faults", "partial_droped", "--out", tmp_path)
    assert code == 2
    assert "did you mean 'partial_dropped'?" in err

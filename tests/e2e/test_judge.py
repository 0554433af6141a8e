"""``run.py judge`` as its users meet it."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.e2e

SMOKE = "scenarios/smoke/ep2_dp.yaml"
SCHEMA = json.loads(Path("reports/result.schema.json").read_text())


@pytest.fixture
def traces(called, tmp_path):
    """The folder with the traces of a run, clean or with a fault."""

    def save(*options):
        out = tmp_path / "run"
        called(SMOKE, "--runtime", "loopback", "--save-traces", "--out", out, "--quiet", *options)
        return out / "traces" / "random"

    return save


def test_a_clean_trace_exits_0_with_one_line_and_its_files(called, traces, tmp_path):
    out = tmp_path / "judged"
    code, printed, told = called("judge", SMOKE, "--trace", traces(), "--out", out, "--quiet")
    assert (code, told) == (0, "")
    assert printed.startswith("ep2_dp: agree: 2 ranks, 8 tokens; ")
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "result.json"]
    jsonschema.validate(json.loads((out / "result.json").read_text()), SCHEMA)


def test_a_faulty_trace_exits_1_and_its_command_does_the_same_again(called, traces, tmp_path):
    folder, out = traces("--inject", "partial_dropped"), tmp_path / "judged"
    code, printed, _ = called("judge", SMOKE, "--trace", folder, "--out", out)
    assert code == 1
    assert printed.startswith("ep2_dp: discrepancy: stage combine, rank 1, token 5: ")
    words = json.loads((out / "result.json").read_text())["reproduce"].split()
    assert words[1:] == ["run.py", "judge", SMOKE, "--trace", str(folder)]
    assert called(*words[2:], "--out", out)[:2] == (code, printed)


def test_a_trace_with_problems_exits_2_and_lists_all_of_them(called, traces, tmp_path):
    folder = traces()
    (first, second) = sorted(folder.iterdir())
    tensors = load_file(first)
    tensors["gemm1/0/gate_up"] = tensors["gemm1/0/gate_up"].float()
    tensors["gemm2/0/outptu"] = tensors.pop("gemm2/0/output")
    save_file(tensors, first)
    code, printed, told = called("judge", SMOKE, "--trace", folder, "--out", tmp_path / "judged")
    assert (code, printed) == (2, "")
    assert told.startswith(f"{folder}: 3 problem(s)\n")
    for problem in (
        "gemm1/0/gate_up: read float32 ",
        "gemm2/0/outptu: this layer has no such tensor; did you mean gemm2/0/output?",
        "gemm2/0/output: missing, but rank 1 has one",
    ):
        assert f"\n  {problem}" in told
    second.write_bytes(b"\x80\x04\x95")
    code, _, told = called("judge", SMOKE, "--trace", folder, "--out", tmp_path / "judged")
    assert code == 2
    assert f"{second}: no safetensors file" in told


def test_a_pickle_is_no_trace(called, tmp_path):
    torch.save({"route/0/logits": torch.zeros(1)}, tmp_path / "engine.pt")
    code, _, told = called("judge", SMOKE, "--trace", tmp_path, "--out", tmp_path / "judged")
    assert code == 2
    assert "no .safetensors file" in told


def test_a_sweep_is_refused(called, traces, tmp_path):
    base, sweep = yaml.safe_load(Path(SMOKE).read_text()), tmp_path / "sweep.yaml"
    del base["name"]
    sweep.write_text(
        yaml.safe_dump({"sweep": "two", "base": base, "axes": {"inputs.seed": [1, 2]}})
    )
    code, _, told = called("judge", sweep, "--trace", traces(), "--out", tmp_path / "judged")
    assert code == 2
    assert "a sweep is many scenarios, a trace is of one" in told


def test_traces_of_an_earlier_run_do_not_stay(called, traces, tmp_path):
    folder = traces()
    called(SMOKE, "--runtime", "loopback", "--out", tmp_path / "run", "--quiet")
    assert list(folder.glob("*.safetensors")) == []


def test_every_round_leaves_a_trace_of_its_own(traces):
    first = traces("--set", "run.rounds=2")
    assert sorted(path.name for path in first.parent.iterdir()) == ["random", "random_2"]

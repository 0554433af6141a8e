"""Each probe's child is believed: what it prints, how it complains, which signal ends it."""

from types import SimpleNamespace

import pytest

from actors import doctor, machine
from actors.doctor import Finding, Health, examine, machine_rows, scenario_rows
from actors.machine import Gpus
from moe.formats import Platform

NONE = Gpus(count=0, platform=None, name="none")
H200 = Gpus(count=1, platform=Platform.SM90, name="NVIDIA H200")

CHILD = """#!/bin/sh
case $3 in
  gloo) echo "a warning"; echo "it answered" ;;
  ray) echo "Traceback" >&2; echo "ImportError: undefined symbol: _ZN3c10" >&2; exit 1 ;;
  cuda) kill -SEGV $$ ;;
  nccl) exit 7 ;;
  deep_gemm) sleep 60 ;;
esac
"""


@pytest.fixture
def has(monkeypatch, tmp_path):
    """A machine with these GPUs, whose children answer as ``CHILD`` does."""
    child = tmp_path / "python"
    child.write_text(CHILD)
    child.chmod(0o755)
    monkeypatch.setattr(doctor, "sys", SimpleNamespace(executable=str(child)))
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "deep_ep" else object())
    monkeypatch.setattr(doctor, "PATIENCE_S", 0.5)

    def give(gpus):
        for module in (doctor, machine):
            monkeypatch.setattr(module, "gpus", lambda: gpus)

    return give


@pytest.mark.parametrize(
    ("gpus", "name", "health", "detail"),
    [
        (NONE, "gloo", Health.OK, "it answered"),
        (NONE, "ray", Health.BROKEN, "ImportError: undefined symbol: _ZN3c10"),
        (NONE, "nccl", Health.MISSING, "torch sees no GPU here"),
        (H200, "deep_ep", Health.MISSING, "deep_ep is not installed"),
        (H200, "cuda", Health.BROKEN, "its process was ended by SIGSEGV"),
        (H200, "nccl", Health.BROKEN, "its process ended with 7"),
        (H200, "deep_gemm", Health.BROKEN, "no answer within 0 s"),
    ],
    ids=["answers", "abi", "no gpu", "not installed", "signal", "silent end", "hangs"],
)
def test_a_probe_is_told_by_how_its_process_ends(has, gpus, name, health, detail):
    has(gpus)
    assert examine([name]) == [Finding(name=name, health=health, detail=detail)]


def test_scenarios_are_grouped_by_what_keeps_them_from_running(has, monkeypatch):
    has(H200)
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    paths = [f"scenarios/gpu/{name}.yaml" for name in ("gpu1_tp4", "gpu1_ep8_ll", "gpu2_tp2")]
    broken = Finding(name="deep_gemm", health=Health.BROKEN, detail="dim == 2 or dim == 3")
    assert scenario_rows(paths, [broken]) == [
        ("gpu1_tp4, gpu1_ep8_ll", "would fail: deep_gemm: dim == 2 or dim == 3"),
        ("gpu2_tp2", "run.device cuda needs 2 GPU(s), torch sees 1 here"),
    ]
    assert scenario_rows(paths[:1], []) == [("gpu1_tp4", "runs")]


def test_versions_that_fit_the_torch_that_is_here_are_named(has, monkeypatch):
    has(NONE)
    monkeypatch.setattr(doctor.torch, "__version__", "2.11.0+cu130")
    assert dict(machine_rows())["built for torch 2.11"].startswith("sgl-deep-gemm==0.1.2 ")

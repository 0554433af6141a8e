"""``--jobs`` and ``--resume``: a sweep killed in the middle goes on as if nothing had been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.row_log import FILE

pytestmark = pytest.mark.e2e

SWEEP = """\
sweep: small
about: six rows of two ranks
base:
  model:
    preset: deepseek_v4
    overrides: {hidden_size: 256, moe_intermediate_size: 256, n_routed_experts: 8}
  parallel: {world_size: 2, attention: {dp: 2}, moe: {ep: 2}}
  moe: {recipe: bf16}
  platform: sm100
  batch: {tokens: [5, 0]}
  inputs: {modes: [random]}
  run: {runtime: loopback}
axes:
  moe.dispatcher: [standard, deepep_normal, deepep_v2]
  batch.phase: [extend, decode]
seeds: [1, 2]
"""
ROWS = 12


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SWEEP)
    return path


def command(sweep: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "run.py", str(sweep), "--out", str(out), "--quiet", *more]


def without_times(out: Path) -> dict:
    found = json.loads((out / "sweep.json").read_text())
    return found | {"seconds": None, "rows": [{**row, "seconds": None} for row in found["rows"]]}


def whole_lines(out: Path) -> list[str]:
    path = out / FILE
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def until_rows(out: Path, number: int, driver: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while len(whole_lines(out)) < number:
        assert driver.poll() is None, "the sweep ended before it could be killed"
        assert time.monotonic() < end, "no row came"
        time.sleep(0.01)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_sweep_killed_in_the_middle_is_resumed_to_the_same_end(sweep, tmp_path, jobs, called):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    driver = subprocess.Popen(
        command(sweep, killed, "--jobs", jobs), text=True, start_new_session=True
    )
    until_rows(killed, 2, driver)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    end = time.monotonic() + 30
    while in_session(driver.pid):
        assert time.monotonic() < end, "a worker outlived its command"
        time.sleep(0.05)
    before = whole_lines(killed)
    with (killed / FILE).open("a") as file:
        file.write(before[0][:40])  # as if it had been killed while it wrote

    code, said, _ = called(sweep, "--out", killed, "--quiet", "--jobs", jobs, "--resume")
    assert code == 0
    assert said.count("agree  ") == ROWS - len(before)
    assert called(sweep, "--out", whole, "--quiet")[0] == 0
    assert without_times(killed) == without_times(whole)
    assert whole_lines(killed)[: len(before)] == before


def test_resume_without_a_folder_says_what_it_needs(sweep, called):
    code, _, told = called(sweep, "--resume")
    assert (code, told.strip()) == (2, "--resume needs --out: the folder of the run to go on with")


def in_session(session: int) -> list[int]:
    """Processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, own = text.rpartition(")")[2].split()[:4]
        if int(own) == session and state != "Z":
            found.append(int(text.split()[0]))
    return found

"""What this machine can run, and why not the rest: every backend is probed by a real call."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Final

import torch

from actors.machine import gpus, lacking
from actors.results import environment
from scenarios.loader import load_scenario
from scenarios.paths import expand_paths
from scenarios.sweep_file import holds_sweep

PATIENCE_S: Final = 180.0
"""Of a probe: DeepGEMM compiles a kernel a form, and Ray starts a cluster."""

NEEDS_GPU: Final = ("cuda", "nccl", "deep_gemm", "deep_ep")

FITTING: Final = (
    ("2.11", "sgl-deep-gemm==0.1.2 with apache-tvm-ffi==0.1.9; tokenspeed-deepep with NCCL 2.30.7"),
    ("2.13", "sgl-deep-gemm==0.2.0; sgl-deep-ep==0.1.2"),
    ("2.14", "sgl-deep-gemm==0.2.5; sgl-deep-ep==0.1.2.post1"),
)
"""torch -> what was built for its C++ ABI; the first ran on an H200, the others are pins."""


class Health(StrEnum):
    """What a probe came to."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    name    of the probe
    health  broken: it is here, and its first call fails
    detail  what was seen, or why not
    """

    name: str
    health: Health
    detail: str


def examine(probes: Sequence[str]) -> list[Finding]:
    """Every probe in a child process; those that take no GPU side by side."""
    with ThreadPoolExecutor(1 if gpus().count else len(probes)) as pool:
        return list(pool.map(_finding, probes))


def _finding(name: str) -> Finding:
    if name in NEEDS_GPU and not gpus().count:
        return Finding(name=name, health=Health.MISSING, detail="torch sees no GPU here")
    if name in ("ray", "deep_gemm", "deep_ep") and find_spec(name) is None:
        return Finding(name=name, health=Health.MISSING, detail=f"{name} is not installed")
    command = [sys.executable, "-m", "actors.probes", name]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=Path(__file__).parents[1],
        )
    except subprocess.TimeoutExpired:
        return Finding(
            name=name, health=Health.BROKEN, detail=f"no answer within {PATIENCE_S:.0f} s"
        )
    if done.returncode == 0:
        return Finding(name=name, health=Health.OK, detail=_last_line(done.stdout))
    return Finding(name=name, health=Health.BROKEN, detail=_reason(done))


def _reason(done: "subprocess.CompletedProcess[str]") -> str:
    """Why a child ended: the last line that it complained in, or the signal that ended it."""
    if done.returncode < 0:
        return f"its process was ended by {signal.Signals(-done.returncode).name}"
    return _last_line(done.stderr) or f"its process ended with {done.returncode}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def machine_rows() -> Iterator[tuple[str, str]]:
    """Name and value of what a bug report should say of this machine."""
    for name, value in environment().items():
        yield name, str(value)
    if gpus().count:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        yield "gpu memory", f"{memory:.0f} GiB"
        yield "links", _links()
    yield "nvcc", which("nvcc") or "not found: DeepGEMM and DeepEP v2 compile with it at first use"
    release = ".".join(torch.__version__.split(".")[:2])
    for torch_version, packages in FITTING:
        if torch_version == release:
            yield f"built for torch {release}", packages


def _links() -> str:
    """What joins the first two GPUs, as nvidia-smi says it: NV and a number of links, or a bus."""
    program = which("nvidia-smi")
    if program is None or gpus().count < 2:
        return "one GPU" if program else "unknown"
    done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, check=False)
    first = [line.split() for line in done.stdout.splitlines() if line.startswith("GPU0")]
    return first[0][2] if first and len(first[0]) > 2 else "unknown"


def scenario_rows(paths: Sequence[str], findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Scenarios by whether they run here: what they lack, or what they name that is broken."""
    broken = {one.name: one.detail for one in findings if one.health is Health.BROKEN}
    by_answer: dict[str, list[str]] = {}
    for path in expand_paths(paths):
        if holds_sweep(path):
            continue
        loaded = load_scenario(path)
        scenario = loaded.scenario
        backends = (scenario.run.backends.gemm, scenario.run.backends.transport)
        reasons = lacking(loaded) or [
            f"would fail: {name}: {broken[name]}" for name in backends if name in broken
        ]
        by_answer.setdefault("; ".join(reasons) or "runs", []).append(scenario.name)
    return [(", ".join(names), answer) for answer, names in by_answer.items()]

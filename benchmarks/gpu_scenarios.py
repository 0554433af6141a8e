"""The scenarios for GPUs on the GPUs that are here, and ten faults there and on the CPU.

    python -m benchmarks.gpu_scenarios [--out FILE] [--faults] [SCENARIO ...]

Without SCENARIO those of ``scenarios/gpu`` that this machine has the GPUs for, each in this process
and with all checks. With ``--faults`` each of ten faults is let loose on ``gpu1_ep8_normal`` twice:
as the file has it, and with the reference GEMM on the CPU. Rank, stage and kind of mistake have to
be the same. Prints what is seen; FILE gets it as JSON, with versions and date.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from actors.by_mode import Keep
from actors.driver import run_scenario
from actors.machine import lacking
from actors.results import environment
from reports.result import Result
from scenarios.loader import load_scenario

FOLDER: Final = Path(__file__).parent.parent / "scenarios" / "gpu"
FAULTY: Final = FOLDER / "gpu1_ep8_normal.yaml"
ON_CPU: Final = ("run.device=cpu", "run.backends.gemm=torch")
FAULTS: Final = (
    "experts_strided",
    "tokens_swapped",
    "count_off_by_one",
    "padding_expert_id_flipped",
    "output_index_divided_twice",
    "gate_up_swapped",
    "routed_no_clamp",
    "scaling_factor_twice",
    "k_from_row0",
    "shared_expert_missing",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one scenario.

    seconds       of each part of the run, and ``all``
    own_worst     largest error / band of all stages and ranks
    certified     mode exact's share of certain cells of the output
    off_recipe    relative distance of the output to the golden of the same recipe, by mode
    peak_gib      memory of the GPU
    """

    name: str
    verdict: str
    as_expected: bool
    summary: str
    backends: dict[str, str]
    seconds: dict[str, float]
    own_worst: float
    certified: float | None
    off_recipe: dict[str, float]
    peak_gib: float


def row_of(path: Path, sets: Sequence[str] = ()) -> Row:
    """Run a scenario with all checks."""
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = run_scenario(load_scenario(path, overrides=sets), keep=Keep(traces=False)).result
    spent = {**result.timing, "all": time.perf_counter() - start}
    return Row(
        name=result.name,
        verdict=result.verdict,
        as_expected=result.as_expected,
        summary=result.summary,
        backends={axis: f"{one.name} {one.version}" for axis, one in result.backends.items()},
        seconds={part: round(float(value), 2) for part, value in spent.items()},
        own_worst=max((row.own_worst or 0.0 for row in result.stages), default=0.0),
        certified=_certified(result),
        off_recipe={
            row.mode: row.run_to_same_recipe for row in result.golden if row.stage == "glue_out"
        },
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
    )


def _certified(result: Result) -> float | None:
    if result.certificate is None:
        return None
    shares = [row.certified for row in result.certificate.stages if row.stage == "glue_out"]
    return shares[0] if shares else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What a verdict says of a fault, by its first finding."""

    verdict: str
    stage: str | None = None
    rank: int | None = None
    mistake: str | None = None
    confidence: str | None = None


def blame(fault: str, sets: Sequence[str]) -> Blame:
    """Let a fault loose and ask what was seen."""
    loaded = load_scenario(FAULTY, overrides=[f"inject=[{fault}]", *sets])
    result = run_scenario(loaded, asks=False, keep=Keep(traces=False)).result
    if not result.findings:
        return Blame(verdict=result.verdict)
    first = result.findings[0]
    return Blame(
        verdict=result.verdict,
        stage=first.stage,
        rank=first.rank,
        mistake=first.mistake,
        confidence=first.confidence,
    )


def asked_faults() -> list[dict[str, Any]]:
    """Every fault on the GPU and on the CPU."""
    rows = []
    for fault in FAULTS:
        on_gpu, on_cpu = blame(fault, ()), blame(fault, ON_CPU)
        print(
            f"{fault:28} {'same' if on_gpu == on_cpu else 'DIFFERS'} {on_gpu} {on_cpu}", flush=True
        )
        rows.append({"fault": fault, "gpu": asdict(on_gpu), "cpu": asdict(on_cpu)})
    return rows


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--faults", action="store_true")
    arguments = parser.parse_args()
    paths = arguments.scenarios or sorted(FOLDER.glob("*.yaml"))
    here = [path for path in paths if not lacking(load_scenario(path))]
    if not here:
        sys.exit("this machine has the GPUs of none of them")
    facts: dict[str, Any] = {"environment": environment(), "date": time.strftime("%F"), "rows": []}
    for path in here:
        row = row_of(path)
        print(f"{row.name:24} {row.seconds['all']:7.1f} s {row.peak_gib:6.1f} GiB  {row.summary}")
        print(
            f"  {row.seconds}, worst own {row.own_worst:.3f}, certified {row.certified}", flush=True
        )
        facts["rows"].append(asdict(row))
        _write(arguments.out, facts)
    if arguments.faults:
        facts["faults"] = asked_faults()
        _write(arguments.out, facts)


def _write(out: Path | None, facts: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Runs without a fault over shipped and generated scenarios, seed by seed: none may find anything.

    python -m benchmarks.false_alarms --out FILE [--seeds 20] [--generated 200] [--modes random]
                                    [--part 1/4] [--jobs 2] [--asked 2]

Every scenario is run with the seeds 0 to ``--seeds`` - 1, weights and tokens drawn anew, on
loopback; the first ``--asked`` of them are asked about determinism and have twins, too. Shipped
scenarios that expect to agree come with their sizes, except for those that say otherwise in
``SMALLER``. A line of JSON is appended to FILE as soon as a scenario is through, and a scenario
whose line is there already is left out, so that the work can be stopped, resumed and divided.
Prints a line a scenario, each false alarm with the command that repeats it, and the sum.
"""

import argparse
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from actors.driver import run_scenario
from actors.machine import lacking
from benchmarks.generated import BASE, generated
from reports.result import Verdict
from scenarios.loader import load_scenario
from scenarios.paths import expand_paths
from scenarios.sources import code_digest
from scenarios.sweep_file import holds_sweep

ROOT: Final = Path(__file__).parent.parent

SMALLER: Final = {
    "ep256_dp": (
        "parallel={world_size: 16, attention: {dp: 16}, moe: {ep: 16}}",
        f"batch.tokens={[4] * 16}",
        "model.overrides.n_routed_experts=32",
    ),
    "ep8_dp_kernel_sizes": ("model.overrides.n_routed_experts=8",),
}
"""Shipped scenarios that take too long for many seeds -> what makes them smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clean:
    """One scenario: a file, from the project's folder, and what is set in it."""

    name: str
    path: str
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What became of one scenario.

    alarms   seed -> the sentence of a run that did not agree
    worst    largest error / band of all stages, ranks and seeds
    code     digest of the project's code that ran
    """

    name: str
    path: str
    sets: tuple[str, ...]
    modes: tuple[str, ...]
    seeds: int
    asked: int
    code: str
    alarms: dict[int, str]
    worst: float
    seconds: float


def shipped() -> Iterator[Clean]:
    """The scenario files that come with the project, expect to agree and can run here."""
    for path in expand_paths([ROOT / "scenarios"]):
        if holds_sweep(path):
            continue
        loaded = load_scenario(path)
        if loaded.scenario.expect.verdict == "agree" and not lacking(loaded):
            yield Clean(
                name=path.stem,
                path=str(path.relative_to(ROOT)),
                sets=("run.runtime=loopback", *SMALLER.get(path.stem, ())),
            )


def drawn(count: int) -> Iterator[Clean]:
    """The generated scenarios of the first numbers."""
    for number in range(count):
        yield Clean(
            name=f"generated_{number}",
            path=str(BASE.relative_to(ROOT)),
            sets=generated(number).sets,
        )


def run(one: Clean, modes: Sequence[str], seeds: int, asked: int) -> Line:
    """Run and judge a scenario with every seed, and ask the first few about determinism."""
    torch.set_num_threads(1)
    start, alarms, worst = time.perf_counter(), {}, 0.0
    for seed in range(seeds):
        sets = (*one.sets, f"inputs={{modes: [{', '.join(modes)}], seed: {seed}}}")
        loaded = load_scenario(ROOT / one.path, overrides=sets)
        result = run_scenario(loaded, asks=seed < asked).result
        worst = max([worst, *(row.own_worst or 0.0 for row in result.stages)])
        if result.verdict is not Verdict.AGREE:
            alarms[seed] = result.summary
    return Line(
        name=one.name,
        path=one.path,
        sets=one.sets,
        modes=tuple(modes),
        seeds=seeds,
        asked=asked,
        code=code_digest(),
        alarms=alarms,
        worst=worst,
        seconds=round(time.perf_counter() - start, 2),
    )


def wanted(arguments: argparse.Namespace) -> list[Clean]:
    """This part's scenarios that have no line yet."""
    part, parts = map(int, arguments.part.split("/"))
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    through = {
        line["name"]
        for line in map(json.loads, lines)
        if (line["modes"], line["seeds"]) == (arguments.modes, arguments.seeds)
    }
    every = [*shipped(), *drawn(arguments.generated)]
    return [one for one in every[part - 1 :: parts] if one.name not in through]


def main() -> None:
    """Run everything and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--generated", type=int, default=200)
    parser.add_argument("--modes", nargs="+", default=["random"])
    parser.add_argument("--asked", type=int, default=2)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    asked = partial(run, modes=arguments.modes, seeds=arguments.seeds, asked=arguments.asked)
    work, start = wanted(arguments), time.perf_counter()
    alarms = runs = 0
    with ProcessPoolExecutor(arguments.jobs) as pool, arguments.out.open("a") as file:
        for line in pool.map(asked, work):
            file.write(json.dumps(asdict(line)) + "\n")
            file.flush()
            runs, alarms = runs + line.seeds, alarms + len(line.alarms)
            print(f"{line.name:28} worst {line.worst:.3f}, {line.seconds:6.1f} s", flush=True)
            for seed, said in line.alarms.items():
                sets = [f"--set {shlex.quote(one)}" for one in line.sets]
                print(f"  seed {seed}: {said}\n  python run.py {line.path} {' '.join(sets)}")
    spent = time.perf_counter() - start
    print(f"{len(work)} scenarios, {runs} runs, {alarms} false alarms, {spent:.0f} s")


if __name__ == "__main__":
    main()

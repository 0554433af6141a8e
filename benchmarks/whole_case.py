"""A whole clean scenario, warm: every mode with all checks, twins and questions of determinism.

    python -m benchmarks.whole_case [--runs 7] [--threads 2] [SCENARIO]

Ranks, judges and the reference topology live on and have their weights; each run is what a second
call in the same process costs. Prints wall and processor time of each part, median and least of the
runs. Budget: ``ep8_dp`` in 1 s on 2 idle cores.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

import torch

from actors.driver import open_world
from actors.living import LivingScenario, diagnosed, rounds_of
from actors.memory import keep_freed_memory
from actors.resolve import resolve
from actors.results import RunFacts, judged_result
from reports.result import Result
from reports.verdict import goldens, judge, twins
from scenarios.loader import load_scenario

DEFAULT = Path(__file__).parent.parent / "scenarios" / "ep8_dp.yaml"

INSIDE: Final[Mapping[str, tuple[ModuleType | type, str]]] = {
    "goldens": (goldens, "golden_forward"),
    "distances": (judge, "measure"),
    "certificate and exact check": (judge, "certify"),
    "distribution": (judge, "check_distribution"),
    "twins": (twins.Twins, "noise"),
}
"""Parts of a verdict that are told apart: where each is looked up. What is left is the checks."""


@dataclass(slots=True)
class Clock:
    """Wall and processor seconds by part; what a part calls of another one counts for that one."""

    wall: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _since: tuple[float, float] = (0.0, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block for ``name``."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        if self._open:
            name = self._open[-1]
            self.wall[name] = self.wall.get(name, 0.0) + wall - self._since[0]
            self.cpu[name] = self.cpu.get(name, 0.0) + cpu - self._since[1]
        self._since = wall, cpu

    def around(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """``work``, counted for ``name``."""

        def counted(*args: Any, **named: Any) -> Any:  # noqa: ANN401  whatever ``work`` takes
            with self.part(name):
                return work(*args, **named)

        return counted


def run_once(living: LivingScenario, clock: Clock) -> Result:
    """The whole scenario, part by part."""
    with ExitStack() as patched:
        for name, (where, attribute) in INSIDE.items():
            counted = clock.around(name, getattr(where, attribute))
            patched.enter_context(patch.object(where, attribute, counted))
        with clock.part("forwards"):
            reports = living.forwards()
        with clock.part("checks"):
            runs = living.judged(reports, living.judges)
        with clock.part("determinism"):
            runs = living.asked(runs, living.judges)
        with clock.part("diagnosis"):
            runs = diagnosed(runs, living.judges)
        facts = RunFacts(loaded=living.loaded, resolved=living.resolved, seconds={}, reproduce="")
        with clock.part("result"):
            return judged_result(facts, runs, living.world.ranks())


def living_scenario(path: Path) -> LivingScenario:
    """A scenario on loopback that has run once."""
    loaded = load_scenario(path, overrides=["run.runtime=loopback"])
    resolved, run = resolve(loaded), loaded.scenario.run
    world = open_world(resolved, run, None)
    living = LivingScenario(loaded=loaded, resolved=resolved, inputs=rounds_of(loaded), world=world)
    run_once(living, Clock())
    return living


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Milliseconds of one part; noise of a shared machine only adds."""

    part: str
    wall_median: float
    wall_least: float
    cpu_least: float


def table_of(clocks: list[Clock]) -> list[Spent]:
    """Every part of some runs, and all of them together."""
    for clock in clocks:
        clock.wall["whole"], clock.cpu["whole"] = (
            sum(seconds.values()) for seconds in (clock.wall, clock.cpu)
        )
    return [
        Spent(
            part=part,
            wall_median=statistics.median(clock.wall[part] * 1e3 for clock in clocks),
            wall_least=min(clock.wall[part] * 1e3 for clock in clocks),
            cpu_least=min(clock.cpu[part] * 1e3 for clock in clocks),
        )
        for part in clocks[0].wall
    ]


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    living = living_scenario(arguments.scenario)
    clocks = [Clock() for _ in range(arguments.runs)]
    for clock in clocks:
        result = run_once(living, clock)
    print(result.summary)
    rows = table_of(clocks)
    for row in rows:
        print(
            f"{row.part:28} wall median {row.wall_median:8.1f} ms  least {row.wall_least:8.1f} ms"
            f"  processor least {row.cpu_least:8.1f} ms"
        )
    parts = {row.part: [row.wall_median, row.wall_least, row.cpu_least] for row in rows}
    rounded = {part: [round(spent, 1) for spent in row] for part, row in parts.items()}
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    facts = {**machine, "torch": torch.__version__, "date": time.strftime("%F")}
    print(json.dumps({**facts, "verdict": result.verdict, "ms": rounded}))


if __name__ == "__main__":
    main()

"""The same faults in the same scenarios, judged by this verdict and by tolerances that others use.

    python -m benchmarks.other_judges [--cases a2a v2 ...] [--jobs 2] [--out benchmarks/results]

Every fault is let loose on the cases of scenarios/sweeps/score.yaml, or on some of them. The
others see what tests of MoE layers see: the layer's output against a same-recipe golden of the
same tokens, that of the run without a fault. Pairs whose traces are the clean run's bit for bit
are void, and left out, as are those whose ranks fail or whose trace cannot be judged, which no
tolerance is asked about. Writes other_judges.json, and the table between the markers of
docs/verdict.md.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor

from actors.driver import Outcome, run_scenario
from actors.kept import KeptWork, forwards_differ
from actors.session import scenarios_of
from moe.faults import CLASSES, FAULTS, FaultClass
from reports.result import Verdict
from scenarios.inject import FaultSpec
from scenarios.loader import LoadedScenario
from scenarios.sweep import load_path

ROOT: Final = Path(__file__).parent.parent
SWEEP: Final = ROOT / "scenarios" / "sweeps" / "score.yaml"
PAGE: Final = ROOT / "docs" / "verdict.md"
BEGIN, END = "<!-- other judges: begin -->", "<!-- other judges: end -->"
CLEAN: Final = "clean runs"
TRIED: Final = "tried"
OURS: Final = "this verdict"

Counts: TypeAlias = dict[str, dict[str, int]]
"""Class of a fault, or ``CLEAN`` -> judge, or ``TRIED`` -> how many pairs it objected to."""


def calc_diff(got: Tensor, want: Tensor) -> bool:
    """One minus a similarity of the whole tensor is 1e-3 or more.

    Source: DeepGEMM, deep_gemm/testing/numeric.py::calc_diff; its tests and SGLang's comparator.
    """
    total = (got * got + want * want).sum()
    return not bool(1 - 2 * (got * want).sum() / total < 1e-3)


def flat_tolerance(got: Tensor, want: Tensor) -> bool:
    """Some element is off by more than 3e-2 + 3e-2 of its value: vLLM's and FlashInfer's way."""
    return not torch.allclose(got, want, atol=3e-2, rtol=3e-2)


def share_of_elements(got: Tensor, want: Tensor) -> bool:
    """More than 1 % of the elements are off by over 2e-1 + 2e-1 of their value: AITER's way."""
    return not bool(torch.isclose(got, want, atol=2e-1, rtol=2e-1).double().mean() >= 0.99)


OTHERS: Final[Mapping[str, Callable[[Tensor, Tensor], bool]]] = {
    "calc_diff < 1e-3": calc_diff,
    "allclose 3e-2": flat_tolerance,
    "99 % within 2e-1": share_of_elements,
}
"""Judge -> whether it objects to an output [T, H] float64, given what is due."""


def compare(loaded: LoadedScenario) -> Counter[tuple[str, str]]:
    """(class, judge) -> pairs of one scenario to which it objects."""
    torch.set_num_threads(1)
    kept = KeptWork()
    clean = run_scenario(loaded, kept=kept)
    counts = Counter((CLEAN, judge) for judge in _objecting(clean, clean))
    for name, fault in FAULTS.items():
        if fault.kind.is_of_the_judge:
            continue
        faulty = replace(loaded, faults=(FaultSpec(name, {}),))
        outcome = run_scenario(faulty, kept=kept)
        if outcome.runs and forwards_differ(clean.forwards, outcome.forwards):
            counts.update((CLASSES[name].name, judge) for judge in _objecting(outcome, clean))
    return counts


def _objecting(outcome: Outcome, clean: Outcome) -> Iterator[str]:
    """``TRIED``, and the judges that object to any forward of a run."""
    yield TRIED
    if outcome.result.verdict is not Verdict.AGREE:
        yield OURS
    for judge, objects in OTHERS.items():
        if any(
            objects(run.judgement.output.double(), due.judgement.same_recipe.output)
            for run, due in zip(outcome.runs, clean.runs, strict=True)
        ):
            yield judge


def table(counts: Counts) -> str:
    """Caught of tried, class by class, as Markdown."""
    judges = (OURS, *OTHERS)
    lines = [
        f"| kind of fault | tried | {' | '.join(judges)} |",
        f"|---|---|{'---|' * len(judges)}",
    ]
    rows = {kind.value: counts.get(kind.name, {}) for kind in FaultClass}
    faults = {title: row for title, row in rows.items() if row}
    total = sum((Counter(row) for row in faults.values()), Counter[str]())
    for title, row in {
        **faults,
        "**all**": total,
        "false alarms in clean runs": counts[CLEAN],
    }.items():
        caught = " | ".join(str(row.get(judge, 0)) for judge in judges)
        lines.append(f"| {title} | {row.get(TRIED, 0)} | {caught} |")
    return "\n".join(lines)


def renewed(page: str, counts: Counts) -> str:
    """The page with the table between its markers."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{table(counts)}\n\n{END}{tail}"


def main() -> None:
    """Run, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", help="names; all without")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    start = time.perf_counter()
    work = load_path(SWEEP, overrides=(), injects=(), known_faults=FAULTS)
    chosen = arguments.cases
    scenarios = [one for one in scenarios_of(work) if not chosen or one.scenario.name in chosen]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        parts = list(pool.map(compare, scenarios))
    counts: Counts = {}
    for (kind, judge), count in sum(parts, Counter[tuple[str, str]]()).items():
        counts.setdefault(kind, {})[judge] = count
    facts = {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "seconds": round(time.perf_counter() - start),
        "scenarios": [loaded.scenario.name for loaded in scenarios],
        "counts": counts,
    }
    (arguments.out / "other_judges.json").write_text(json.dumps(facts) + "\n")
    PAGE.write_text(renewed(PAGE.read_text(), counts))
    print(table(counts))


if __name__ == "__main__":
    main()

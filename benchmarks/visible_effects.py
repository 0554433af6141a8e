"""How often effects are flagged at twice the size that a run says it could have seen.

    python -m benchmarks.visible_effects [--seeds 2] [--trials 40] [FILE...]

Runs each scenario on loopback, clean, and enters its comparisons again with a gain on one cell,
one row, one rank, one expert or one block of 128 columns of a tensor, in front of the store. The
gain is twice the stage's smallest visible effect in ``visibility``, up or down. Also counts how
often the clean forwards themselves are flagged. Prints one line a scenario and stage; the last line
is JSON.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from actors.driver import run_scenario
from actors.resolve import resolve
from moe.formats import Stage
from moe.golden import round_bf16
from reports.verdict.compared import Comparison
from reports.verdict.decode import BLOCK
from reports.verdict.distribution import check_distribution, evidence_needed
from reports.verdict.judge import Judge
from reports.verdict.ledger import Ledger
from reports.verdict.sight import Sight, sight_of
from reports.verdict.tallies import Kind
from scenarios.loader import load_scenario

FOLDER = Path(__file__).parent.parent / "scenarios"
SHIPPED = ("ep8_dp", "ep8_dp_sm90", "ep8_dp_bf16", "topologies/ep_tp_hybrid", "topologies/dp_tp")
KINDS = ("cell", "row", *Kind)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Clean:
    """A forward without a mistake: its comparisons, what it could have seen, what it found."""

    compared: Sequence[Comparison]
    sight: dict[Stage, Sight]
    evidence: float
    flagged: bool


def clean_run(path: Path, seed: int) -> Clean:
    """Run and judge one scenario."""
    sets = ("run.runtime=loopback", "inputs.modes=[random]", f"inputs.seed={seed}")
    loaded = load_scenario(path, overrides=sets)
    run = run_scenario(loaded).runs[0]
    traces = [report.trace for report in run.reports]
    calls = [report.calls for report in run.reports]
    compared = Judge(resolve(loaded).judged).comparisons(run.batch, traces, calls)
    ledger = run.judgement.ledger
    return Clean(
        compared=compared,
        sight=dict(sight_of(ledger)),
        evidence=evidence_needed(ledger),
        flagged=bool(ledger.deviations),
    )


def effect_of(sight: Sight, kind: str) -> float | None:
    """The smallest visible one of a kind."""
    if kind == "cell":
        return sight.cell
    return sight.row if kind == "row" else sight.by_kind.get(Kind(kind))


def is_flagged(clean: Clean, stage: Stage, kind: str, gain: float, draw: torch.Generator) -> bool:
    """Whether a gain on one randomly chosen cell, row or group of a stage is found."""
    of_stage = [one for one in clean.compared if one.stage is stage and bool((one.want != 0).any())]
    chosen = of_stage[_drawn(len(of_stage), draw)]
    if kind in ("cell", "row"):
        rows = (chosen.want != 0).any(1).nonzero()
        row = chosen.of_rows(rows[_drawn(len(rows), draw)])
        at = torch.ones_like(row.got, dtype=torch.bool)
        if kind == "cell":
            live = (row.want[0] != 0).nonzero()[:, 0]
            at[:] = False
            at[0, live[_drawn(len(live), draw)]] = True
        return _found([with_gain(row, at, gain)], clean.evidence)
    same_tensor = [one for one in of_stage if one.tensor == chosen.tensor]
    group = _drawn_group(same_tensor, Kind(kind), draw)
    changed = [_of_group(one, Kind(kind), group, gain) for one in same_tensor]
    return _found(changed, clean.evidence)


def _of_group(one: Comparison, kind: Kind, group: int, gain: float) -> Comparison:
    """The rows of one rank or expert with a gain, or all rows with a gain on a block of columns."""
    if kind is Kind.COLUMNS:
        block = torch.arange(one.got.shape[1]) // BLOCK
        return with_gain(one, (block == group).expand(one.got.shape), gain)
    index = one.rows.rank if kind is Kind.RANK else one.rows.expert
    rows = one.of_rows((index == group).nonzero()[:, 0])
    return with_gain(rows, torch.ones_like(rows.got, dtype=torch.bool), gain)


def with_gain(one: Comparison, at: Tensor, gain: float) -> Comparison:
    """The comparison with some cells scaled in front of their store; the others as they are."""
    if one.stored:
        # What is in front of the store is the golden's value; the run's own steps stay.
        off = one.got - round_bf16(one.want)
        changed = round_bf16(one.want * (1 + gain)) + off
    else:
        changed = (one.got * (1 + gain)).to(torch.float32).to(torch.float64)
    return replace(one, got=torch.where(at, changed, one.got))


def _drawn_group(compared: Sequence[Comparison], kind: Kind, draw: torch.Generator) -> int:
    """A rank, expert or block of columns that has cells."""
    if kind is Kind.COLUMNS:
        return _drawn(-(-compared[0].got.shape[1] // BLOCK), draw)
    rows = [one.rows for one in compared]
    index = torch.cat([of.rank if kind is Kind.RANK else of.expert for of in rows])
    found = torch.unique(index[index >= 0])
    return int(found[_drawn(len(found), draw)])


def _found(compared: Sequence[Comparison], evidence: float) -> bool:
    ledger = Ledger()
    for one in compared:
        one.enter(ledger)
    check_distribution(ledger, evidence)
    return bool(ledger.deviations)


def _drawn(count: int, draw: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=draw))


def rates(
    runs: Sequence[Clean], trials: int, factor: float = 2.0
) -> Iterator[tuple[Stage, str, float]]:
    """(stage, kind, share flagged) of effects of ``factor`` times the smallest visible one."""
    draw = torch.Generator().manual_seed(0)
    for stage in Stage:
        for kind in KINDS:
            outcomes = []
            for clean in runs:
                effect = effect_of(clean.sight[stage], kind) if stage in clean.sight else None
                if effect is None or effect == float("inf"):
                    continue
                for trial in range(trials):
                    gain = factor * effect * (1 if trial % 2 else -1)
                    outcomes.append(is_flagged(clean, stage, kind, gain, draw))
            if outcomes:
                yield stage, kind, sum(outcomes) / len(outcomes)


def main() -> None:
    """Run everything and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--trials", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = {}
    for path in arguments.files or [FOLDER / f"{name}.yaml" for name in SHIPPED]:
        runs = [clean_run(path, seed) for seed in range(arguments.seeds)]
        rows: dict[Stage, dict[str, float]] = {}
        for stage, kind, rate in rates(runs, arguments.trials):
            rows.setdefault(stage, {})[kind] = round(rate, 3)
        flagged = sum(run.flagged for run in runs)
        table[path.stem] = {"clean_runs": len(runs), "clean_runs_flagged": flagged, "rates": rows}
        print(f"{path.stem}: {flagged} of {len(runs)} clean runs flagged", flush=True)
        for stage, of_kind in rows.items():
            print(f"  {stage:13}", *(f"{kind} {rate:.3f}" for kind, rate in of_kind.items()))
    facts = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    print(json.dumps({**facts, "trials": arguments.trials, "scenarios": table}))


if __name__ == "__main__":
    main()

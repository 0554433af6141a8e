"""Clean runs of scenarios over awkward token lists and seeds: none may find anything.

    python -m benchmarks.awkward_tokens [--seeds 20] [--large-seeds 20] [--hidden-size 256]
                                        [FILE...]

Every scenario runs on loopback, its model made smaller, with token lists that are equal, uneven,
idle in one group after the other, busy in one group alone, a single token, as many tokens as
experts, and around 1,024. Dispatchers with buffers have room for 32 rows a rank, so run those with
``--large-seeds 0``. Prints one line a scenario; the last line is JSON.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.driver import run_scenario
from scenarios.loader import load_scenario

FOLDER = Path(__file__).parent.parent / "scenarios" / "topologies"
LARGE = (1023, 1024, 1025)
ROOM = 32
"""Rows that a rank may send, where a dispatcher has a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One clean run."""

    path: Path
    label: str
    tokens: tuple[int, ...]
    seed: int
    hidden_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of it: the summary where it did not agree, the worst share of a band else."""

    case: Case
    alarm: str | None
    worst: float


def token_lists(groups: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(label, tokens of each attention-DP group), every label once."""
    uneven = tuple((5 * place + 3) % 13 for place in range(groups))
    yield "equal", (4,) * groups
    yield "uneven", uneven
    for idle in range(groups):
        yield f"group {idle} idle", tuple(0 if i == idle else n + 1 for i, n in enumerate(uneven))
    for busy in dict.fromkeys((0, groups - 1)):
        yield f"group {busy} alone", tuple(7 if i == busy else 0 for i in range(groups))
    yield "one token", (*(0,) * (groups - 1), 1)
    yield "no token", (0,) * groups
    yield "as many tokens as experts", spread(experts, groups)
    for total in LARGE:
        yield f"{total} tokens", spread(total, groups)


def spread(total: int, groups: int) -> tuple[int, ...]:
    """``total`` tokens over groups, as equally as possible."""
    short, longer = divmod(total, groups)
    return tuple(short + (place < longer) for place in range(groups))


def cases(path: Path, seeds: int, large_seeds: int, hidden_size: int = 256) -> Iterator[Case]:
    """All clean runs of one topology; the large lists, which take most of the time, last."""
    loaded = load_scenario(path)
    groups = loaded.scenario.parallel.attention.dp
    for label, tokens in token_lists(groups, loaded.model.n_routed_experts):
        for seed in range(large_seeds if sum(tokens) in LARGE else seeds):
            yield Case(path=path, label=label, tokens=tokens, seed=seed, hidden_size=hidden_size)


def run(case: Case) -> Outcome:
    """Run and judge one case."""
    torch.set_num_threads(1)
    loaded = load_scenario(
        case.path,
        overrides=[
            "run.runtime=loopback",
            "inputs.modes=[random]",
            f"batch.tokens={list(case.tokens)}",
            f"inputs.seed={case.seed}",
            f"model.overrides.hidden_size={case.hidden_size}",
            f"moe.switches.max_dispatch_tokens_per_rank={ROOM}",
        ],
    )
    result = run_scenario(loaded).result
    worst = max((row.own_worst or 0.0 for row in result.stages), default=0.0)
    return Outcome(
        case=case, alarm=None if result.verdict == "agree" else result.summary, worst=worst
    )


def main() -> None:
    """Run everything and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--large-seeds", type=int, default=20)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    rows = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for path in arguments.files or sorted(FOLDER.glob("*.yaml")):
            start = time.perf_counter()
            wanted = cases(path, arguments.seeds, arguments.large_seeds, arguments.hidden_size)
            outcomes = list(pool.map(run, wanted, chunksize=4))
            alarms = [outcome for outcome in outcomes if outcome.alarm]
            rows[path.stem] = {
                "runs": len(outcomes),
                "false_alarms": len(alarms),
                "worst_of_band": max(outcome.worst for outcome in outcomes),
                "seconds": round(time.perf_counter() - start, 1),
            }
            print(f"{path.stem:24} {rows[path.stem]}", flush=True)
            for outcome in alarms:
                print(f"  {outcome.case.label}, seed {outcome.case.seed}: {outcome.alarm}")
    facts = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    counts = {"seeds": arguments.seeds, "large_seeds": arguments.large_seeds}
    print(json.dumps({**facts, **counts, "topologies": rows}))


if __name__ == "__main__":
    main()

"""How small failures become, and in which time: a fault of each stage in scenarios of 4 to 8 ranks.

    python -m benchmarks.shrink [--only FAULT ...]

Each fault is injected into a shipped scenario as it stands, on loopback; what fails is shrunk, kept
as a capsule, and replayed from its files. The clock does not end a search here. Prints a line a
fault and the medians; the last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final

import torch

from actors.capsule import write_capsule
from actors.driver import run_scenario
from actors.session import Session
from actors.shrink import Limits, shrink
from reports.failure import failure_of
from reports.result import Result
from scenarios.loader import LoadedScenario, load_scenario

ROOT: Final = Path(__file__).parent.parent / "scenarios"
EP8: Final = "ep8_dp.yaml"

CASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gate_up_swapped": EP8,
        "chunks_read_as_equal": "topologies/dp_ep_reduce_scatter.yaml",
        "expert_chosen_twice:row=3": EP8,
        "tokens_swapped:rank=3,row=5": EP8,
        "padding_row_counted:rank=5": EP8,
        "gemm_tail_rows_dropped": EP8,
        "routed_no_clamp": EP8,
        "tile_of_next_block:stage=gemm2": EP8,
        "topk_weights_twice": EP8,
        "partial_dropped": EP8,
        "reduction_missing": "topologies/dp_ep_all_reduce.yaml",
        "scatter_without_sum": "topologies/dp_ep_reduce_scatter.yaml",
    }
)
"""Fault, as injected -> the shipped scenario that it goes into; a stage after the other."""

LIMITS: Final = Limits(candidates=500, seconds=float("inf"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a reader of a failure has to look at."""

    ranks: int
    tokens: int
    experts: int
    top_k: int
    hidden_size: int
    width: int
    recipe: str

    @staticmethod
    def of(loaded: LoadedScenario) -> "Size":
        """Of a scenario."""
        scenario, model = loaded.scenario, loaded.model
        return Size(
            ranks=scenario.parallel.world_size,
            tokens=sum(scenario.batch.tokens),
            experts=model.n_routed_experts,
            top_k=model.num_experts_per_tok,
            hidden_size=model.hidden_size,
            width=model.moe_intermediate_size,
            recipe=str(scenario.moe.recipe),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one failure.

    replays  from its capsule, bit for bit
    """

    scenario: str
    failure: str
    before: Size
    after: Size
    candidates: int
    refused: int
    cpu_s: float
    wall_s: float
    replays: bool


def shrunk_and_replayed(fault: str, file: str, folder: Path) -> Row:
    """Inject a fault, shrink what fails, keep it in a folder, replay it from there."""
    loaded = load_scenario(ROOT / file, overrides=["run.runtime=loopback"], injects=[fault])
    failure = failure_of(run_scenario(loaded, asks=False).result)
    assert failure is not None, f"{fault} does not act in {file}"
    start = time.process_time()
    shrunk = shrink(loaded, failure, LIMITS, lambda line: None)
    spent = time.process_time() - start
    return Row(
        scenario=loaded.scenario.name,
        failure=str(failure),
        before=Size.of(loaded),
        after=Size.of(shrunk.loaded),
        candidates=shrunk.tried,
        refused=shrunk.refused,
        cpu_s=round(spent, 1),
        wall_s=round(shrunk.seconds, 1),
        replays=replayed(write_capsule(shrunk, "", folder), folder).as_expected,
    )


def replayed(scenario: Path, folder: Path) -> Result:
    """The result of a capsule, from its files alone."""
    session = Session()
    (again,) = session.load([str(scenario)])
    assert isinstance(again, LoadedScenario), "a capsule holds no sweep"
    return session.run(again, folder)


def main() -> None:
    """Shrink every failure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES)
    torch.set_num_threads(1)
    rows: dict[str, Row] = {}
    for fault in parser.parse_args().only:
        with TemporaryDirectory() as folder:
            row = rows[fault] = shrunk_and_replayed(fault, CASES[fault], Path(folder))
        print(f"{fault:28} {row.cpu_s:5.1f} s, replays: {row.replays}, {row.after}", flush=True)
    medians = {
        "ranks": median(row.after.ranks for row in rows.values()),
        "tokens": median(row.after.tokens for row in rows.values()),
    }
    print(medians)
    facts = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "medians": medians}
    print(json.dumps({**facts, "faults": {fault: asdict(row) for fault, row in rows.items()}}))


if __name__ == "__main__":
    main()

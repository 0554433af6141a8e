"""Every recipe with every dispatcher, activation and platform: what agrees, how far off, how fast.

    python -m benchmarks.recipes [--runs 5] [--threads 1]

Every combination is run on loopback, four ranks and one of them idle: also those that a server's
policy refuses, but none that means nothing. Each has the rules that refuse it, its verdict, and of
its last stages two relative distances, the recipe's own and the run's. Prints what does not agree;
the last line is JSON. Budget for the sizes of scenarios/ep8_dp.yaml: with fp4 experts twice the
wall time that fp8 blocks take.
"""

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch

from actors.driver import run_scenario
from moe.formats import Platform, QuantRecipe, Stage
from reports.result import Result
from scenarios.command_line import apply_sets
from scenarios.loader import check_document, load_scenario
from scenarios.rules import BrokenRule, RuleKind
from scenarios.yaml_text import read_file

FOLDER: Final = Path(__file__).parent.parent / "scenarios"
BASE: Final = FOLDER / "smoke" / "ep2_dp.yaml"
TIMED: Final = FOLDER / "ep8_dp.yaml"
LAST_STAGES: Final = (Stage.ACTIVATION, Stage.GEMM2, Stage.GLUE_OUT)
RANKS: Final = (
    "run.runtime=loopback",
    "parallel={world_size: 4, attention: {dp: 4}, moe: {ep: 4}}",
    "batch.tokens=[5, 0, 9, 3]",
)
DISPATCHERS: Final[Mapping[str, tuple[str, ...]]] = {
    # Their shared expert would be sharded into parts that no block of a weight fits.
    "standard masked": ("standard", "moe.layout=masked", "moe.shared_experts=replicated"),
    "standard compact": ("standard", "moe.layout=compact", "moe.shared_experts=replicated"),
    "flashinfer": ("flashinfer",),
    "deepep_normal": ("deepep_normal",),
    "deepep_ll": ("deepep_ll", "batch.phase=decode"),
    "deepep_v2 extend": ("deepep_v2", "batch.phase=extend"),
    "deepep_v2 decode": ("deepep_v2", "batch.phase=decode"),
}
FOUR_OF_EIGHT: Final = {"n_routed_experts": 8, "num_experts_per_tok": 4}
ACTIVATIONS: Final[Mapping[str, tuple[str, Mapping[str, int]]]] = {
    "silu": ("deepseek_v3", {**FOUR_OF_EIGHT, "n_group": 1, "topk_group": 1}),
    "silu with limit": ("deepseek_v4", FOUR_OF_EIGHT),
    "oai_swiglu": ("gpt_oss", {"num_local_experts": 8}),
    "situ": (
        "kimi_k3",
        {"num_experts": 8, "num_experts_per_token": 4, "routed_expert_hidden_size": 256},
    ),
}
"""Name -> a preset that has it, and its experts in small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination."""

    recipe: str
    platform: str
    activation: str
    dispatcher: str

    def __str__(self) -> str:
        return f"{self.recipe}, {self.platform}, {self.activation}, {self.dispatcher}"

    @property
    def settings(self) -> list[str]:
        """What is set in the smallest scenario."""
        dispatcher, *more = DISPATCHERS[self.dispatcher]
        preset, experts = ACTIVATIONS[self.activation]
        sizes = {**_widths(preset, self.recipe), **experts}
        return [
            *RANKS,
            f"moe.recipe={self.recipe}",
            f"platform={self.platform}",
            f"moe.dispatcher={dispatcher}",
            *more,
            f"model.preset={preset}",
            f"model.overrides={json.dumps(sizes)}",
        ]


def _widths(preset: str, recipe: str) -> dict[str, int]:
    """Of a row and of an expert; gpt_oss pads its fp4 experts, so it gets something to pad."""
    if preset == "gpt_oss":
        width = 320 if recipe.startswith("mxfp4") else 256
        return {"hidden_size": width, "intermediate_size": width}
    return {"hidden_size": 256, "moe_intermediate_size": 256}


def cases() -> Iterator[Case]:
    """The whole product."""
    for recipe, platform, activation, dispatcher in product(
        QuantRecipe, Platform, ACTIVATIONS, DISPATCHERS
    ):
        yield Case(recipe=recipe, platform=platform, activation=activation, dispatcher=dispatcher)


def refusals(case: Case) -> tuple[BrokenRule, ...]:
    """Rules that refuse a combination; empty where it is legal."""
    document = read_file(BASE)
    apply_sets(document, case.settings)
    checked = check_document(document, BASE)
    assert not checked.problems, checked.problems
    return checked.refusals


def means_something(broken: tuple[BrokenRule, ...]) -> bool:
    """Whether nothing but a server's policy stands against it."""
    return all(rule.kind is RuleKind.POLICY for rule in broken)


def run(case: Case, *, asks: bool = True) -> Result:
    """Run and judge one combination, a server's policy aside.

    Args:
        case: the combination.
        asks: see ``run_scenario``.
    """
    settings = [*case.settings, "allow_unsupported=true"]
    return run_scenario(load_scenario(BASE, overrides=settings), asks=asks).result


def row_of(case: Case) -> dict[str, Any]:
    """What is worth keeping of a combination."""
    broken = refusals(case)
    row: dict[str, Any] = {"refused_by": [rule.name for rule in broken]} if broken else {}
    if not means_something(broken):
        return row
    result = run(case)
    if result.verdict != "agree":
        print(f"{case}: {result.summary}", flush=True)
    return row | {"verdict": result.verdict, "distances": distances(result)}


def distances(result: Result) -> dict[str, list[float]]:
    """Stage -> same recipe to ideal, run to same recipe; three digits."""
    return {
        each.stage: [_short(each.same_recipe_to_ideal), _short(each.run_to_same_recipe)]
        for each in result.golden
        if each.stage in LAST_STAGES
    }


def _short(number: float) -> float:
    return float(f"{number:.3g}")


def counts(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many are legal, refused by each rule, and came to each verdict."""
    return {
        "combinations": len(rows),
        "legal": sum("refused_by" not in row for row in rows.values()),
        "refused_by": Counter(name for row in rows.values() for name in row.get("refused_by", [])),
        "verdicts": Counter(row["verdict"] for row in rows.values() if "verdict" in row),
    }


def seconds(recipe: QuantRecipe) -> float:
    """Wall time of the EP8 scenario on loopback, from its file to its result."""
    start = time.perf_counter()
    sets = ("run.runtime=loopback", f"moe.recipe={recipe}")
    result = run_scenario(load_scenario(TIMED, overrides=sets)).result
    assert result.verdict == "agree", result.summary
    return time.perf_counter() - start


def fp4_against_fp8(runs: int) -> dict[str, Any]:
    """Medians of both recipes, timed in turn, and their ratio; the first turn is not counted."""
    recipes = (QuantRecipe.FP8_BLOCK128, QuantRecipe.MXFP4_W4A8)
    turns = [[seconds(recipe) for recipe in recipes] for _ in range(runs + 1)][1:]
    fp8, fp4 = (statistics.median(times) for times in zip(*turns, strict=True))
    return {
        "scenario": TIMED.name,
        "runs": runs,
        "fp8_block128_s": round(fp8, 3),
        "mxfp4_w4a8_s": round(fp4, 3),
        "ratio": round(fp4 / fp8, 2),
    }


def main() -> None:
    """Run everything and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each timed recipe")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    timed = fp4_against_fp8(arguments.runs)
    print(timed, flush=True)
    start = time.perf_counter()
    rows = {str(case): row_of(case) for case in cases()}
    facts = {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "fp4_against_fp8": timed,
        "seconds": round(time.perf_counter() - start, 1),
        **counts(rows),
        "rows": rows,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()

"""How much of exact mode is certified, recipe by recipe, and that no certified cell differs.

    python -m benchmarks.certified --out FILE [--part 1/4] [--jobs 2]

On exact inputs and on loopback: every legal combination of recipe, platform, activation and
dispatcher (``benchmarks.recipes``), and every shipped scenario that expects to agree. A line of
JSON is appended to FILE as soon as one is through, and one whose line is there already is left
out, so that the work can be stopped, resumed and divided. Prints the least share of each recipe and
platform, and every line that is refused or has a certified cell that differs.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from actors.driver import run_scenario
from benchmarks import recipes
from benchmarks.false_alarms import ROOT, Clean, shipped
from scenarios.loader import load_scenario

EXACT: Final = ("inputs.modes=[exact]", "run.runtime=loopback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What became of one forward.

    about      recipe and platform
    certified  share of the output's cells
    void       of all: certified and an ideal zero
    least      the condition that fewest cells fulfil, and how many do
    differing  certified cells of the output that are not the golden's
    refusal    why the check was not asked; None: it was
    summary    of the run
    """

    name: str
    about: str
    certified: float
    void: float
    least: str | None
    least_share: float
    differing: int
    refusal: str | None
    verdict: str
    summary: str


def combinations() -> Iterator[Clean]:
    """Every legal one, as settings of the smallest scenario."""
    path = str(recipes.BASE.relative_to(ROOT))
    for case in recipes.cases():
        if not recipes.refusals(case):
            yield Clean(name=str(case), path=path, sets=tuple(case.settings))


def run(one: Clean) -> Line | None:
    """One forward on exact inputs; None where no token came to an output."""
    loaded = load_scenario(ROOT / one.path, overrides=[*one.sets, *EXACT])
    outcome = run_scenario(loaded, asks=False)
    judgement = outcome.runs[0].judgement
    facts = judgement.certificate
    if facts is None:
        return None
    differs = judgement.output.double() != judgement.same_recipe.output
    return Line(
        name=one.name,
        about=f"{loaded.scenario.moe.recipe} {loaded.scenario.platform}",
        certified=_short(facts.output.certified),
        void=_short(facts.output.void),
        least=facts.least,
        least_share=_short(facts.least_share),
        differing=int((differs & facts.output_cells).sum()),
        refusal=facts.refusal,
        verdict=outcome.result.verdict,
        summary=outcome.result.summary,
    )


def _short(share: float) -> float:
    return round(share, 4)


def wanted(arguments: argparse.Namespace) -> list[Clean]:
    """This part's forwards that have no line yet."""
    part, parts = map(int, arguments.part.split("/"))
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    through = {json.loads(line)["name"] for line in lines}
    every = [*shipped(), *combinations()]
    return [one for one in every[part - 1 :: parts] if one.name not in through]


def summary(lines: Sequence[Line]) -> list[str]:
    """A line a recipe and platform, and one for each forward that says too little or is wrong."""
    said = []
    for about in sorted({line.about for line in lines}):
        asked = [line for line in lines if line.about == about and line.refusal is None]
        refused = sum(line.about == about for line in lines) - len(asked)
        least = min((line.certified for line in asked), default=0.0)
        said.append(f"{about:24} {len(asked):4} asked, least {least:.1%}; {refused} refused")
    for line in lines:
        if line.refusal:
            said.append(f"refused: {line.name}: {line.refusal}")
        if line.differing or line.verdict != "agree":
            said.append(f"WRONG: {line.name}: {line.differing} cells; {line.summary}")
    return said


def main() -> None:
    """Run what is wanted, and print what all lines of the file come to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    work = wanted(arguments)
    with ProcessPoolExecutor(arguments.jobs) as pool, arguments.out.open("a") as file:
        for line in pool.map(run, work):
            if line is not None:
                file.write(json.dumps(asdict(line)) + "\n")
                file.flush()
    lines = [Line(**json.loads(line)) for line in arguments.out.read_text().splitlines()]
    print("\n".join(summary(lines)))


if __name__ == "__main__":
    main()

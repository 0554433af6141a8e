"""``compare.json``: two runs side by side, as types, and what there is to say of them."""

from collections.abc import Iterator
from typing import Final, Literal

from reports.comparison import Comparison, Likeness
from reports.json_types import Items
from reports.record import Mode, Record, Verdict

FORMAT: Final = "moe-assay-compare/1"


class ComparedRun(Record):
    """One of the two."""

    name: str
    source: str
    """The scenario file that was run, or the result that was read."""
    verdict: Verdict
    summary: str


class CheckDifference(Record):
    """A check that came to something else."""

    name: str
    mode: Mode | None
    one: str
    other: str


class CompareResult(Record):
    """What two runs of one model and one token list have in common, and what not."""

    format: Literal["moe-assay-compare/1"] = FORMAT
    one: ComparedRun
    other: ComparedRun
    same: bool
    """Verdicts, checks and every bit that both have kept."""
    checks: Items[CheckDifference]
    modes: Items[Comparison]
    """Empty where ranks of one of them did not come back."""
    conclusion: str


def compare_lines(result: CompareResult) -> Iterator[str]:
    """A line a difference or mode of equal bits, and one that says what they come to."""
    one, other = result.one, result.other
    if one.verdict is not other.verdict:
        yield f"verdict: {one.name} {one.verdict}, {other.name} {other.verdict}"
    for check in result.checks:
        where = f" [{check.mode}]" if check.mode else ""
        yield f"{check.name}{where}: {one.name} {check.one}, {other.name} {check.other}"
    for mode in result.modes:
        if mode.stage is None:
            yield f"{mode.mode}: every bit that both have kept is equal"
        else:
            yield f"{mode.mode}: {_first_cell(mode)}"
            yield from (f"{mode.mode}: {line}" for line in _distances(mode))
    yield result.conclusion


def conclusion_of(one: ComparedRun, other: ComparedRun, modes: list[Comparison]) -> str:
    """Bug or noise, in one sentence."""
    wrong = [run for run in (one, other) if run.verdict is not Verdict.AGREE]
    if wrong:
        return "bug: " + "; ".join(f"{run.name}: {run.summary}" for run in wrong)
    odd = next((mode for mode in modes if mode.likeness is Likeness.BREAKS), None)
    if odd is not None:
        return f"unexplained: both agree with their goldens, but {odd.reason} ({odd.mode})"
    parted = next((mode for mode in modes if mode.likeness is Likeness.ROUNDING), None)
    if parted is not None:
        return f"noise: both agree with their goldens; from {parted.declared} on {parted.reason}"
    return "same: verdicts, checks and every bit that both have kept"


def _first_cell(mode: Comparison) -> str:
    slot = "" if mode.slot is None else f", slot {mode.slot}"
    values = f"{mode.one_value:.6g} in {mode.one}, {mode.other_value:.6g} in {mode.other}"
    place = f"token {mode.token}{slot}, column {mode.column}"
    return f"bits differ first in stage {mode.stage}: {mode.tensor}, {place}: {values}"


def _distances(mode: Comparison) -> Iterator[str]:
    """How far apart the outputs are, beside how far each is from its golden and from the ideal."""
    share = f"{mode.cells} of {mode.num_cells} output cells differ"
    yield f"{share}; apart by {mode.apart:.2g} of the output"
    golden = f"{mode.one} {mode.one_from_golden:.2g}, {mode.other} {mode.other_from_golden:.2g}"
    ideal = f"{mode.one} {mode.one_from_ideal:.4g}, {mode.other} {mode.other_from_ideal:.4g}"
    yield f"each from its own golden: {golden}; from the model without rounding: {ideal}"

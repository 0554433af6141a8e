"""A sweep run row by row in this process; of each row only what ``sweep.json`` holds is kept."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from actors.output import OutputError, prepare_folder
from actors.session import Session, unless_expected
from reports.result import Verdict
from reports.result_file import write_result
from reports.sweep_result import (
    Coverage,
    ExcludedRow,
    ImpossibleCombinations,
    NotRunRow,
    RanRow,
    RefusedRow,
    RefusingRule,
    SweepResult,
)
from scenarios.errors import InputError
from scenarios.loader import LoadedScenario
from scenarios.rules import BrokenRule
from scenarios.sweep import ExpandedSweep, Refusal
from scenarios.sweep_rows import Row

_VERDICT_WIDTH = max(map(len, Verdict))


def run_sweep(
    expanded: ExpandedSweep, folder: Path, session: Session, say: Callable[[str], None]
) -> SweepResult:
    """Run every legal row and write ``sweep.json``, also if something ends the rows early.

    Args:
        expanded: the sweep.
        folder: exists; each row gets a folder of its name in it.
        session: what holds for every row.
        say: is given a line a row, as soon as its verdict is known.

    Raises:
        UserError: input that does not fit, or files that cannot be written.
    """
    start = time.perf_counter()
    rows: list[RanRow] = []
    try:
        for row, loaded in expanded.legal:
            ran = _run_row(row, loaded, folder, session)
            rows.append(ran)
            say(_row_line(expanded.sweep.name, ran, loaded))
    finally:
        seconds = round(time.perf_counter() - start, 2)
        result = _result(expanded, rows, session.reproduce(expanded.sweep.path), seconds)
        _write(result, folder)
    return result


def sweep_warnings(expanded: ExpandedSweep) -> list[str]:
    """What is odd about the sweep itself."""
    unused = expanded.values_without_a_row()
    return [f"axes.{axis}: no legal row has {name}" for axis, name in unused]


def summary_line(result: SweepResult) -> str:
    """The sweep in one line."""
    said = {what: num for what, num in result.counts.items() if num or what != "not_run"}
    counts = ", ".join(f"{num} {what.replace('_', ' ')}" for what, num in said.items())
    return f"{result.name}: {counts}; {result.seconds:.0f} s"


def refusal_lines(refusals: Iterable[Refusal]) -> Iterator[str]:
    """Two lines a rule that refuses rows: how many it refuses, what it says of the first."""
    for refusal in refusals:
        rule = refusal.rule
        yield f"  {refusal.num_rows} refused by {rule.name} [{rule.kind}: {rule.source}]"
        yield f"    {refusal.first}: {rule.field}: {rule.message}"


def coverage_lines(expanded: ExpandedSweep) -> Iterator[str]:
    """What the chosen rows cover, then a line for each set of rules that makes some impossible."""
    coverage = expanded.coverage
    if coverage is None:
        return
    counts = f"{coverage.num_asked} asked for, {coverage.num_covered} covered"
    impossible = sum(coverage.impossible.values())
    yield f"  {expanded.sweep.strategy}: {counts}, {impossible} impossible"
    for rules, num in _busiest_first(coverage.impossible):
        yield f"    {num} impossible by {' with '.join(rules)}"


def _busiest_first(counts: Mapping[tuple[str, ...], int]) -> list[tuple[tuple[str, ...], int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def _coverage(expanded: ExpandedSweep) -> Coverage | None:
    found = expanded.coverage
    if found is None:
        return None
    return Coverage(
        strategy=str(expanded.sweep.strategy),
        asked=found.num_asked,
        covered=found.num_covered,
        impossible=[
            ImpossibleCombinations(rules=list(rules), combinations=num)
            for rules, num in _busiest_first(found.impossible)
        ],
    )


def _write(result: SweepResult, folder: Path) -> None:
    try:
        write_result(result, folder / "sweep.json")
    except OSError as error:
        raise OutputError(f"--out {folder}: {error}") from error


def _run_row(row: Row, loaded: LoadedScenario, folder: Path, session: Session) -> RanRow:
    start = time.perf_counter()
    own = folder / row.name
    prepare_folder(own)
    verdict, as_expected, path = Verdict.FAILED, False, None
    try:
        result = session.run(loaded, own, row.selects)
        verdict, as_expected, summary = result.verdict, result.as_expected, result.summary
        path = f"{row.name}/result.json"
    except InputError as error:
        summary = f"failed: {error}"
    return RanRow(
        name=row.name,
        values=dict(row.values),
        verdict=verdict,
        as_expected=as_expected,
        summary=summary,
        seconds=round(time.perf_counter() - start, 3),
        result=path,
    )


def _row_line(sweep: str, ran: RanRow, loaded: LoadedScenario) -> str:
    line = f"{ran.verdict:{_VERDICT_WIDTH}}  {sweep}/{ran.name}"
    if ran.verdict is not Verdict.AGREE:
        line += f": {ran.summary.removeprefix(f'{ran.verdict}: ')}"
    return line + unless_expected(ran, loaded)


def _result(
    expanded: ExpandedSweep, rows: list[RanRow], reproduce: str, seconds: float
) -> SweepResult:
    return SweepResult(
        name=expanded.sweep.name,
        about=expanded.sweep.about,
        reproduce=reproduce,
        axes={axis.name: [value.name for value in axis.values] for axis in expanded.sweep.all_axes},
        counts=_counts(expanded, rows),
        seconds=seconds,
        rows=rows,
        not_run=[
            NotRunRow(name=row.name, values=dict(row.values))
            for row, _ in expanded.legal[len(rows) :]
        ],
        rules=[_refusing_rule(refusal) for refusal in expanded.refusals()],
        refused=[_refused_row(row, rules) for row, rules in expanded.refused],
        excluded=[
            ExcludedRow(name=row.name, values=dict(row.values), because=because)
            for row, because in expanded.excluded
        ],
        coverage=_coverage(expanded),
        warnings=sweep_warnings(expanded),
    )


def _refused_row(row: Row, rules: Iterable[BrokenRule]) -> RefusedRow:
    messages = {rule.name: rule.message for rule in rules}
    return RefusedRow(name=row.name, values=dict(row.values), rules=messages)


def _counts(expanded: ExpandedSweep, rows: list[RanRow]) -> dict[str, int]:
    ran = Counter(row.verdict for row in rows)
    counts = {str(verdict): ran[verdict] for verdict in Verdict}
    return counts | {
        "not_run": len(expanded.legal) - len(rows),
        "refused": len(expanded.refused),
        "excluded": len(expanded.excluded),
    }


def _refusing_rule(refusal: Refusal) -> RefusingRule:
    rule = refusal.rule
    return RefusingRule(
        name=rule.name,
        kind=rule.kind,
        field=rule.field,
        source=rule.source,
        rows=refusal.num_rows,
        first=refusal.first,
        message=rule.message,
    )

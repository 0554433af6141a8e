"""A sweep run row by row; of each row only what ``sweep.json`` holds is kept."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import compress
from operator import not_
from pathlib import Path

from actors.output import OutputError
from actors.row_log import RowLog, row_digest
from actors.session import Session, is_on_loopback, unless_expected
from actors.sweep_row import RowTask, run_row
from actors.workers import as_done
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
from scenarios.loader import LoadedScenario
from scenarios.rules import BrokenRule
from scenarios.sweep import ExpandedSweep, Refusal
from scenarios.sweep_rows import Row

_VERDICT_WIDTH = max(map(len, Verdict))


def run_sweep(
    expanded: ExpandedSweep,
    folder: Path,
    session: Session,
    say: Callable[[str], None],
    *,
    jobs: int = 1,
    resume: bool = False,
) -> SweepResult:
    """Run every legal row and write ``sweep.json``, also if something ends the rows early.

    Args:
        expanded: the sweep.
        folder: exists; each row gets a folder of its name in it.
        session: what holds for every row.
        say: is given a line a row, as soon as its verdict is known.
        jobs: processes for rows on loopback; with 1, this one.
        resume: leave out rows that ``rows.jsonl`` has as they would run now.

    Raises:
        UserError: input that does not fit, or files that cannot be written.
    """
    start = time.perf_counter()
    log = RowLog(folder, resume=resume)
    rows: dict[str, RanRow] = {}
    try:
        digests = {row.name: row_digest(loaded) for row, loaded in expanded.legal}
        known = {name: log.ran(name, digest) for name, digest in digests.items()}
        rows |= {name: row for name, row in known.items() if row is not None}
        for task, ran in _run_rows(expanded, folder, session, rows, jobs):
            log.append(ran, digests[ran.name])
            rows[ran.name] = ran
            say(_row_line(expanded.sweep.name, ran, task.loaded))
    finally:
        seconds = round(time.perf_counter() - start, 2)
        result = _result(expanded, rows, session.reproduce(expanded.sweep.path), seconds)
        _write(result, folder)
    return result


def _run_rows(
    expanded: ExpandedSweep,
    folder: Path,
    session: Session,
    done: Collection[str],
    jobs: int,
) -> Iterator[tuple[RowTask, RanRow]]:
    """Rows as they end, but for those done; on loopback first if that has processes of its own."""
    tasks = [
        RowTask(row=row, loaded=loaded, folder=folder, session=session)
        for row, loaded in expanded.legal
        if row.name not in done
    ]
    runs_apart = [jobs > 1 and is_on_loopback(task.loaded) for task in tasks]
    apart = list(compress(tasks, runs_apart))
    for number, ran in as_done(run_row, apart, jobs):
        yield apart[number], ran
    for task in compress(tasks, map(not_, runs_apart)):
        yield task, run_row(task)


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


def _row_line(sweep: str, ran: RanRow, loaded: LoadedScenario) -> str:
    line = f"{ran.verdict:{_VERDICT_WIDTH}}  {sweep}/{ran.name}"
    if ran.verdict is not Verdict.AGREE:
        line += f": {ran.summary.removeprefix(f'{ran.verdict}: ')}"
    if ran.earlier:
        line += f" (run again after {ran.earlier[-1].summary})"
    return line + unless_expected(ran, loaded)


def _result(
    expanded: ExpandedSweep, ran: Mapping[str, RanRow], reproduce: str, seconds: float
) -> SweepResult:
    rows = [ran[row.name] for row, _ in expanded.legal if row.name in ran]
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
            for row, _ in expanded.legal
            if row.name not in ran
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

"""One row of a sweep, run and written; once more where the machine failed it."""

import time
from dataclasses import dataclass
from pathlib import Path

from actors.output import prepare_folder
from actors.session import Session
from reports.result import RankVerdict, Result, Verdict
from reports.sweep_result import Attempt, RanRow
from scenarios.errors import InputError
from scenarios.loader import LoadedScenario
from scenarios.sweep_rows import Row

_LOST = (RankVerdict.DIED, RankVerdict.HUNG)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTask:
    """A row to run: its scenario, the sweep's folder, and what holds for every row."""

    row: Row
    loaded: LoadedScenario
    folder: Path
    session: Session


def run_row(task: RowTask) -> RanRow:
    """Run a row; if a rank died or hung although none should, once more.

    Raises:
        UserError: files that cannot be written.
    """
    first, was_lost = _attempt(task)
    if not was_lost:
        return first
    again, _ = _attempt(task)
    earlier = Attempt(verdict=first.verdict, summary=first.summary, seconds=first.seconds)
    return again.model_copy(update={"earlier": (earlier,)})


def _attempt(task: RowTask) -> tuple[RanRow, bool]:
    """A row as it ran, and whether a rank was lost unexpectedly."""
    start = time.perf_counter()
    own = task.folder / task.row.name
    prepare_folder(own)
    verdict, as_expected, path, was_lost = Verdict.FAILED, False, None, False
    try:
        result = task.session.run(task.loaded, own, task.row.selects)
        verdict, as_expected, summary = result.verdict, result.as_expected, result.summary
        path, was_lost = f"{task.row.name}/result.json", _lost_a_rank(result)
    except InputError as error:
        summary = f"failed: {error}"
    row = RanRow(
        name=task.row.name,
        values=dict(task.row.values),
        verdict=verdict,
        as_expected=as_expected,
        summary=summary,
        seconds=round(time.perf_counter() - start, 3),
        result=path,
        earlier=(),
    )
    return row, was_lost


def _lost_a_rank(result: Result) -> bool:
    """Whether the verdict is failed, unexpectedly, and a rank died or came to its time limit."""
    if result.verdict is not Verdict.FAILED or result.as_expected:
        return False
    return any(rank.verdict in _LOST for rank in result.ranks)

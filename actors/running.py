"""``run.py run``: scenarios and sweeps one after the other, a verdict a line as soon as known."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import not_
from pathlib import Path

from actors.console import say, stderr
from actors.dry_run import dry_run_lines
from actors.exit_codes import OK, Told, exit_code
from actors.session import (
    Session,
    Work,
    is_on_loopback,
    one_ray_for,
    prepare_folders,
    unless_expected,
)
from actors.sweep import coverage_lines, refusal_lines, run_sweep, summary_line
from actors.workers import as_done
from reports.result import Result
from scenarios.errors import UserError
from scenarios.loader import LoadedScenario
from scenarios.sweep import ExpandedSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a command runs what it runs.

    jobs    processes for what runs on loopback; with 1, this one
    resume  leave out the rows of sweeps that have run already
    quiet   verdict lines only
    """

    jobs: int = 1
    resume: bool = False
    quiet: bool = False


def run_work(session: Session, work: Sequence[Work], out: Path | None, manner: Manner) -> int:
    """Run all of it and return the exit code; with several jobs, scenarios before sweeps.

    Args:
        session: what holds for everything.
        work: scenarios and sweeps.
        out: see ``prepare_folders``.
        manner: how.

    Raises:
        UserError: input that does not fit, or files that cannot be written.
    """
    if manner.resume and out is None:
        raise UserError("--resume needs --out: the folder of the run to go on with")
    tasks = [
        _Task(one=one, folder=folder, session=session)
        for one, folder in zip(work, prepare_folders(work, out), strict=True)
    ]
    runs_apart = [manner.jobs > 1 and _runs_apart(task.one) for task in tasks]
    apart = list(compress(tasks, runs_apart))
    results: list[Told] = []
    for number, result in as_done(_run_apart, apart, manner.jobs):
        _print(apart[number], result, quiet=manner.quiet)
        results.append(result)
    with one_ray_for(work, session.address):
        for task in compress(tasks, map(not_, runs_apart)):
            results += _run_one(task, manner)
    return exit_code(results)


def say_what_would_run(work: Sequence[Work]) -> int:
    """``--dry-run``: a line each."""
    for line in dry_run_lines(work):
        say(line)
    return OK


def print_verdict(result: Result, loaded: LoadedScenario, folder: Path, *, quiet: bool) -> None:
    """A verdict's line, and where its page is."""
    say(f"{result.name}: {result.summary}{unless_expected(result, loaded)}")
    if not quiet:
        stderr.print(f"  {folder / 'report.html'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A scenario or a sweep with its folder."""

    one: Work
    folder: Path
    session: Session


def _runs_apart(one: Work) -> bool:
    """Whether a process of its own can run it; a sweep deals with its own rows."""
    return isinstance(one, LoadedScenario) and is_on_loopback(one)


def _run_apart(task: _Task) -> Result:
    assert isinstance(task.one, LoadedScenario), "sweeps run here"
    return task.session.run(task.one, task.folder)


def _print(task: _Task, result: Result, *, quiet: bool) -> None:
    assert isinstance(task.one, LoadedScenario), "sweeps have lines of their own"
    print_verdict(result, task.one, task.folder, quiet=quiet)


def _run_one(task: _Task, manner: Manner) -> Sequence[Told]:
    """A scenario's result, or what became of each row of a sweep; its lines are printed."""
    one = task.one
    if isinstance(one, ExpandedSweep):
        return _run_sweep(one, task, manner)
    if not manner.quiet:
        stderr.print(f"{one.scenario.name}: {one.scenario.about or one.path}")
    result = task.session.run(one, task.folder)
    _print(task, result, quiet=manner.quiet)
    return [result]


def _run_sweep(expanded: ExpandedSweep, task: _Task, manner: Manner) -> Sequence[Told]:
    if not manner.quiet:
        sweep = expanded.sweep
        stderr.print(f"{sweep.name}: {sweep.about or sweep.path}: {len(expanded.legal)} rows")
    result = run_sweep(
        expanded, task.folder, task.session, say, jobs=manner.jobs, resume=manner.resume
    )
    say(summary_line(result))
    if not manner.quiet:
        for line in (*coverage_lines(expanded), *refusal_lines(expanded.refusals())):
            say(line)
        for warning in result.warnings:
            stderr.print(f"  warning: {warning}")
        stderr.print(f"  {task.folder / 'sweep.json'}")
    return result.rows

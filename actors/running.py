"""``run.py run``: scenarios and sweeps one after the other, a verdict a line as soon as known."""

from collections.abc import Sequence
from pathlib import Path

from actors.console import say, stderr
from actors.dry_run import dry_run_lines
from actors.exit_codes import OK, Told, exit_code
from actors.session import Session, Work, one_ray_for, prepare_folders, unless_expected
from actors.sweep import coverage_lines, refusal_lines, run_sweep, summary_line
from reports.result import Result
from scenarios.loader import LoadedScenario
from scenarios.sweep import ExpandedSweep


def run_work(session: Session, work: Sequence[Work], out: Path | None, *, quiet: bool) -> int:
    """Run all of it and return the exit code.

    Args:
        session: what holds for everything.
        work: scenarios and sweeps.
        out: see ``prepare_folders``.
        quiet: verdict lines only.

    Raises:
        UserError: input that does not fit, or files that cannot be written.
    """
    folders = prepare_folders(work, out)
    results: list[Told] = []
    with one_ray_for(work, session.address):
        for one, folder in zip(work, folders, strict=True):
            results += _run_one(one, folder, session, quiet)
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


def _run_one(one: Work, folder: Path, session: Session, quiet: bool) -> Sequence[Told]:
    """A scenario's result, or what became of each row of a sweep; its lines are printed."""
    if isinstance(one, ExpandedSweep):
        return _run_sweep(one, folder, session, quiet)
    if not quiet:
        stderr.print(f"{one.scenario.name}: {one.scenario.about or one.path}")
    result = session.run(one, folder)
    print_verdict(result, one, folder, quiet=quiet)
    return [result]


def _run_sweep(
    expanded: ExpandedSweep, folder: Path, session: Session, quiet: bool
) -> Sequence[Told]:
    if not quiet:
        sweep = expanded.sweep
        stderr.print(f"{sweep.name}: {sweep.about or sweep.path}: {len(expanded.legal)} rows")
    result = run_sweep(expanded, folder, session, say)
    say(summary_line(result))
    if not quiet:
        for line in coverage_lines(expanded):
            say(line)
        for line in refusal_lines(expanded.refusals()):
            say(line)
        for warning in result.warnings:
            stderr.print(f"  warning: {warning}")
        stderr.print(f"  {folder / 'sweep.json'}")
    return result.rows

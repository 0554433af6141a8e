"""``run.py shrink``: the smallest scenario that fails as a result did."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from actors.capsule import write_capsule
from actors.console import say, stderr
from actors.judge_trace import JUDGED_TRACE
from actors.output import default_folder, prepare_folder
from actors.session import Session
from actors.shrink import CannotShrinkError, Limits, Shrunk, ready, shrink
from reports.failure import Failure, failure_of
from reports.result import RankVerdict, Result
from reports.result_file import ResultError, read_result
from scenarios.changes import Values, valued
from scenarios.errors import UserError
from scenarios.loader import LoadedScenario
from scenarios.simpler import features

_ENDS_A_PROCESS: Final = (RankVerdict.DIED, RankVerdict.HUNG)

_HANGS: Final = 4
"""So many candidates that hang fit into the seconds of a search."""


def shrink_result(path: Path, out: Path | None, limits: Limits) -> Result:
    """Shrink the scenario of a result, write its capsule, replay it, and print what came of each.

    Args:
        path: a result.json or its folder, of a run that did not agree.
        out: folder for the capsule; None is ``runs/<time>-<name>-capsule``.
        limits: of the search.

    Returns:
        The replay's result, which lies beside the capsule.

    Raises:
        UserError: no such result, nothing to shrink, or a folder that cannot be written to.
    """
    file = path / "result.json" if path.is_dir() else path
    result, failure = failed_result(file)
    folder = default_folder(f"{result.name}-capsule") if out is None else out
    prepare_folder(folder)
    stderr.print(f"{result.name}: {failure}")
    shrunk = _shrunk(result, failure, file, limits)
    scenario = write_capsule(shrunk, result.reproduce, folder)
    for line in summary_lines(shrunk):
        say(line)
    replayed = _replayed(scenario, folder)
    say(f"  {replayed.summary}")
    say(f"  python run.py {folder}")
    return replayed


def _replayed(scenario: Path, folder: Path) -> Result:
    """Of the capsule that was written: from its files alone."""
    session = Session()
    (loaded,) = session.load([str(scenario)])
    assert isinstance(loaded, LoadedScenario), "a capsule holds no sweep"
    return session.run(loaded, folder)


def failed_result(file: Path) -> tuple[Result, Failure]:
    """A result of a run of ours that failed, and the way it did.

    Raises:
        UserError: no result, or one that leaves nothing to shrink.
    """
    try:
        result = read_result(file)
    except ResultError as error:
        raise UserError(str(error)) from error
    failure = failure_of(result)
    if failure is None:
        raise CannotShrinkError(f"{file}: {result.verdict}: nothing to shrink")
    if any(backend.name == JUDGED_TRACE for backend in result.backends.values()):
        raise CannotShrinkError(f"{file}: judged from a trace: no smaller run can be asked for")
    return result, failure


def _shrunk(result: Result, failure: Failure, file: Path, limits: Limits) -> Shrunk:
    """On loopback where the failure shows there, else on the runtime that it came from."""
    runtimes = runtimes_for(result)
    for runtime in runtimes[:-1]:
        try:
            return _shrunk_on(runtime, result, failure, file, limits)
        except UserError as error:
            stderr.print(f"  not on {runtime}: {error}")
    return _shrunk_on(runtimes[-1], result, failure, file, limits)


def runtimes_for(result: Result) -> tuple[str, ...]:
    """Where to look for the failure of a result, in order.

    A rank that dies or hangs would take this process with it.
    """
    scenario: Values = result.scenario
    if valued(scenario, "run.runtime") == "loopback":
        return ("loopback",)
    isolated = any(rank.verdict in _ENDS_A_PROCESS for rank in result.ranks)
    return ("ray",) if isolated else ("loopback", "ray")


def _shrunk_on(
    runtime: str, result: Result, failure: Failure, file: Path, limits: Limits
) -> Shrunk:
    first = ready(values_for(result, runtime, limits.seconds / _HANGS), file)
    with _session(runtime):
        return shrink(first, failure, limits, lambda line: stderr.print(f"  {line}"))


def _session(runtime: str) -> AbstractContextManager[None]:
    """One Ray for all candidates, where they need it."""
    if runtime == "loopback":
        return nullcontext()
    from actors.cluster import ray_session  # loopback must not pay for it

    return ray_session(None)


def values_for(result: Result, runtime: str, timeout_s: float) -> dict[str, Any]:
    """The scenario of a result, for runs that expect nothing and compare with nothing else.

    Args:
        result: a run's.
        runtime: where candidates run.
        timeout_s: at most so long a silent rank is waited for.
    """
    values: Values = result.scenario
    run = values["run"]
    timeout_s = min(run["timeout_s"], timeout_s)
    return {
        **values,
        "run": {**run, "runtime": runtime, "timeout_s": timeout_s},
        "expect": "agree",
        "compare": None,
    }


def summary_lines(shrunk: Shrunk) -> Iterator[str]:
    """What went, what stays, and how far the search got."""
    yield f"{shrunk.loaded.scenario.name}: {shrunk.failure}"
    for step in shrunk.went:
        yield f"  went: {step}"
    yield f"  stays: {_what_stays(shrunk.loaded)}"
    end = f"; ended by the limit of {shrunk.ended_by}" if shrunk.ended_by else ""
    counts = f"{shrunk.tried} candidates ran, {shrunk.refused} were refused"
    yield f"  {counts}, {shrunk.seconds:.1f} s{end}"


def _what_stays(loaded: LoadedScenario) -> str:
    """Sizes and choices of the smallest scenario, and the features that it does not do without."""
    scenario, model = loaded.scenario, loaded.model
    ranks = scenario.parallel.world_size
    sizes = (
        f"{ranks} rank{'s' * (ranks > 1)}, {sum(scenario.batch.tokens)} tokens, "
        f"top {model.num_experts_per_tok} of {model.n_routed_experts} experts, "
        f"hidden size {model.hidden_size}, width {model.moe_intermediate_size}"
    )
    moe = scenario.moe
    choices = (moe.dispatcher, moe.recipe, scenario.batch.phase, scenario.platform)
    on = [change.what.partition(" -> ")[0] for change in features(loaded)]
    return "; ".join([sizes, *map(str, choices), *scenario.inputs.modes, *on, *scenario.inject])

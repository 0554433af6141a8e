"""From a scenario that fails to the smallest that still fails in the same way.

Big steps come first: each ladder starts with its largest, and features go all at once, then in
halves. What is found is a scenario of which no single step is left. The order is fixed, so the same
scenario and limits give the same answer, unless the clock ends the search.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

from actors.by_mode import Keep
from actors.driver import check_input, run_scenario
from actors.resolve import reasons_not_to_run
from moe.faults import FAULTS
from reports.failure import Failure, failure_of
from reports.result import Result
from scenarios.changes import Change, Ladder, LaddersOf, Values, together, values_of
from scenarios.document import Document
from scenarios.errors import UserError
from scenarios.loader import LoadedScenario, load_document
from scenarios.simpler import faults, features, modes, recipes, rounds
from scenarios.smaller import fewer_tokens, sizes, topologies

Tell = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ends a search early.

    candidates  runs
    seconds     of wall time; a run that has begun is waited for
    """

    candidates: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shrunk:
    """What a search came to.

    loaded    the smallest scenario that was found
    result    of its run
    failure   the way in which it fails, as the first one did
    went      steps that were taken, in order
    tried     candidates that ran
    refused   candidates that broke a rule of the schema or had input that does not fit
    seconds   that it took
    ended_by  the limit that ended it before it was through; "" if none did
    """

    loaded: LoadedScenario
    result: Result
    failure: Failure
    went: tuple[str, ...]
    tried: int
    refused: int
    seconds: float
    ended_by: str = ""


class CannotShrinkError(UserError):
    """There is nothing to shrink: no failure, or one that does not come again."""


def shrink(first: LoadedScenario, failure: Failure, limits: Limits, tell: Tell) -> Shrunk:
    """Search for the smallest scenario that fails as ``first`` does.

    Args:
        first: a scenario that failed, ready to run here.
        failure: the way it did.
        limits: of the search.
        tell: is given a line a candidate that runs.

    Raises:
        CannotShrinkError: it does not fail in that way when it is run again.
    """
    search = _Search(failure=failure, limits=limits, tell=tell, path=first.path)
    if not search.fails(Change(what="as it was", sets={}), values_of(first)):
        raise CannotShrinkError(
            f"{first.path}: does not fail in the same way again, which was: {failure}; "
            f"now: {search.said}"
        )
    try:
        search.run_through()
    except _LimitReachedError as limit:
        search.ended_by = str(limit)
    return search.found()


class _LimitReachedError(Exception):
    """A limit of the search is reached; the message says which."""


@dataclass(slots=True, kw_only=True)
class _Search:
    """The smallest failing scenario so far, and what has been tried."""

    failure: Failure
    limits: Limits
    tell: Tell
    path: Path
    start: float = field(default_factory=time.perf_counter)
    best: tuple[LoadedScenario, Result] | None = None
    said: str = ""
    went: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    tried: int = 0
    refused: int = 0
    ended_by: str = ""

    @property
    def loaded(self) -> LoadedScenario:
        """The smallest so far."""
        assert self.best is not None, "the first candidate failed as it should"
        return self.best[0]

    def found(self) -> Shrunk:
        """What the search has come to."""
        assert self.best is not None, "the first candidate failed as it should"
        return Shrunk(
            loaded=self.best[0],
            result=self.best[1],
            failure=self.failure,
            went=tuple(self.went[1:]),
            tried=self.tried,
            refused=self.refused,
            seconds=round(time.perf_counter() - self.start, 2),
            ended_by=self.ended_by,
        )

    def run_through(self) -> None:
        """Take steps until a whole round of them takes none.

        Raises:
            _LimitReachedError: it did not get that far.
        """
        taken = -1
        while taken != len(self.went):
            taken = len(self.went)
            for ladders_of in (modes, rounds, faults, topologies, fewer_tokens):
                self.climb(ladders_of)
            self.drop(features(self.loaded))
            self.drop(tuple(ladder[0] for ladder in sizes(self.loaded) if ladder))
            for ladders_of in (sizes, recipes):
                self.climb(ladders_of)

    def climb(self, ladders_of: LaddersOf) -> None:
        """Of each ladder take the largest step after which the scenario fails as it did."""
        for at in count():
            ladder = next(islice(ladders_of(self.loaded), at, None), None)
            if ladder is None:
                return
            for change in ladder:
                if self.takes(change):
                    break

    def drop(self, changes: Ladder) -> None:
        """Make all changes at once, or each half of them by itself, or none of a single one."""
        if not changes or self.takes(together(changes)) or len(changes) == 1:
            return
        half = len(changes) // 2
        self.drop(changes[:half])
        self.drop(changes[half:])

    def takes(self, change: Change) -> bool:
        """Whether the scenario with this change fails as it did; it is the smallest then."""
        return self.fails(change, change.applied_to(values_of(self.loaded)))

    def fails(self, change: Change, values: Values) -> bool:
        """Run a scenario that has not been run before; the smallest so far, if it fails so.

        Raises:
            _LimitReachedError: no candidate may run any more.
        """
        text = json.dumps(values, sort_keys=True)
        if text in self.known:
            return False
        self.known.add(text)
        try:
            loaded = ready(values, self.path)
        except UserError:
            self.refused += 1
            return False
        self._check_limits()
        result = self._run(loaded)
        fails = result is not None and failure_of(result) == self.failure
        if fails and result is not None:
            self.best = loaded, result
            self.went.append(change.what)
        self.tell(f"{self.tried:4} {'yes' if fails else 'no ':3} {change.what}{self._but(fails)}")
        return fails

    def _run(self, loaded: LoadedScenario) -> Result | None:
        """None where the input turns out not to fit."""
        self.tried += 1
        asks = "determinism" in self.failure.check
        try:
            result = run_scenario(loaded, asks=asks, keep=Keep(traces=False)).result
        except UserError as error:
            self.said = str(error)
            return None
        self.said = result.summary
        return result

    def _but(self, fails: bool) -> str:
        return "" if fails else f": {self.said}"

    def _check_limits(self) -> None:
        if self.tried >= self.limits.candidates:
            raise _LimitReachedError(f"{self.limits.candidates} candidates")
        if self.tried and time.perf_counter() - self.start >= self.limits.seconds:
            raise _LimitReachedError(f"{self.limits.seconds:g} s")


def ready(values: Values, path: Path) -> LoadedScenario:
    """The scenario that the values make, ready to run here.

    Args:
        values: a whole scenario.
        path: what it is called in messages; paths among the values are absolute.

    Raises:
        UserError: a rule refuses it, its input does not fit, or this machine does not run it.
    """
    loaded = load_document(Document(value=dict(values)), path, known_faults=FAULTS)
    if reasons := reasons_not_to_run(loaded):
        raise UserError(f"{path}: {'; '.join(reasons)}")
    check_input(loaded)
    return loaded

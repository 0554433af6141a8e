"""In which way a run failed, so that two runs can be said to fail in the same one."""

import re
from typing import Final

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.record import Record, Verdict
from reports.result import CheckVerdict, Confidence, RankVerdict, Result

GUILTY: Final = (RankVerdict.RAISED, RankVerdict.HUNG, RankVerdict.DIED)
_EXCEPTION: Final = re.compile(r"[A-Za-z_][\w.]*(?=:|$)")


class Failure(Record):
    """The way of a run that did not agree: where, seen by which check, and of which kind."""

    verdict: Verdict
    stage: Stage | None = None
    """Of the first divergence, or where the first guilty rank ended."""
    check: str = ""
    """The check that found the first divergence, or those that could not judge."""
    mistake: Mistake | None = None
    """What the diagnosis of the first divergence names; null where it names none."""
    cause: str = ""
    """How the first guilty rank ended, with the class of what it raised."""

    def __str__(self) -> str:
        where = f" in {self.stage}" if self.stage else ""
        parts = [self.check, self.mistake and f"named {self.mistake}", self.cause]
        return ", ".join([f"{self.verdict}{where}", *filter(None, parts)])


def failure_of(result: Result) -> Failure | None:
    """The way in which a run failed; None of one that agrees or could not run here."""
    if result.verdict not in (Verdict.DISCREPANCY, Verdict.FAILED):
        return None
    if result.first_divergence is not None:
        first = result.findings[0]
        named = None if first.confidence is Confidence.NONE else first.mistake
        return Failure(verdict=result.verdict, stage=first.stage, check=first.check, mistake=named)
    for rank in result.ranks:
        if rank.verdict in GUILTY:
            cause = f"{rank.verdict} {_exception(rank.cause or '')}".strip()
            return Failure(verdict=result.verdict, stage=rank.stage, cause=cause)
    unjudged = [check.name for check in result.checks if check.verdict is CheckVerdict.FAILED]
    return Failure(verdict=result.verdict, check=", ".join(dict.fromkeys(unjudged)))


def _exception(cause: str) -> str:
    """The class that a cause begins with; "" where it is a sentence."""
    found = _EXCEPTION.match(cause)
    return found[0] if found else ""

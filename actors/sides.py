"""Judged runs as sides of a comparison, straight from the ranks."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from actors.result_rows import ModeRun
from reports.record import Mode
from reports.verdict.canonical import CanonicalForward, canonical_forward
from reports.verdict.certified_bits import CertainValues
from reports.verdict.judge import Judge
from reports.verdict.side_by_side import Distances, Side, distances

if TYPE_CHECKING:
    from actors.driver import Outcome


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KeptSide:
    """What is kept of a forward for comparisons to come; see ``Side``."""

    forward: CanonicalForward
    distances: Distances
    certain: CertainValues | None


def kept_side(judge: Judge, run: ModeRun) -> KeptSide:
    """Of a judged forward whose traces are still there."""
    subject = judge.subject(run.batch, [report.trace for report in run.reports])
    judgement = run.judgement
    return KeptSide(
        forward=canonical_forward(subject).kept(),
        distances=distances(judgement.output, judgement.same_recipe.output, judgement.ideal.output),
        certain=judge.certain_values(subject, judgement.same_recipe),
    )


def sides_of(name: str, outcome: "Outcome") -> dict[Mode, Side]:
    """The first round of every mode of a run whose ranks came back, and that kept its sides."""
    return {
        mode: Side(
            name=name,
            mode=mode,
            verdict=outcome.result.verdict,
            summary=outcome.result.summary,
            forward=kept.forward,
            distances=kept.distances,
            certain=kept.certain,
        )
        for mode, kept in outcome.sides.items()
    }

"""Judged runs as sides of a comparison, straight from the ranks."""

from actors.driver import Outcome
from actors.result_rows import ModeRun
from reports.record import Mode
from reports.verdict.canonical import canonical_forward
from reports.verdict.side_by_side import Side


def sides_of(name: str, outcome: Outcome) -> dict[Mode, Side]:
    """The first round of every mode of a run whose ranks came back."""
    firsts = (run for run in outcome.runs if run.round == 0)
    return {run.mode: _side(name, outcome, run) for run in firsts}


def _side(name: str, outcome: Outcome, run: ModeRun) -> Side:
    judge = outcome.judges[run.mode]
    subject = judge.subject(run.batch, [report.trace for report in run.reports])
    return Side(
        name=name,
        mode=run.mode,
        verdict=outcome.result.verdict,
        summary=outcome.result.summary,
        forward=canonical_forward(subject).kept(),
        golden=run.judgement.same_recipe.output,
        ideal=run.judgement.ideal.output,
        certain=judge.certain_values(subject, run.judgement.same_recipe),
    )

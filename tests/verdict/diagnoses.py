"""Diagnoses of clean runs with tensors of one stage on one rank replaced."""

from collections.abc import Mapping

from torch import Tensor

from moe.formats import Stage
from reports.verdict.diagnosis import Diagnosis
from reports.verdict.judge import Judge
from tests.verdict.clean_runs import CleanRun


def diagnosed(
    run: CleanRun,
    stage: Stage,
    rank: int,
    tensors: Mapping[str, Tensor],
    *,
    earlier: CleanRun | None = None,
    judge: Judge | None = None,
) -> Diagnosis:
    """Of the first deviation of the first of these tensors."""
    traces = run.changed(stage, rank, tensors)
    judge = judge or run.judge
    ledger = run.judged(traces, judge=judge)
    before = None if earlier is None else (earlier.batch, earlier.traces)
    found = judge.diagnose(run.batch, traces, ledger, before)
    name = next(iter(tensors)).removeprefix("rows.").removesuffix(".values").removesuffix(".scale")
    first = next(
        one
        for one in ledger.deviations
        if (one.stage, one.rank) == (stage, rank) and one.tensor.removeprefix("rows.") == name
    )
    return found[first]


def named(diagnosis: Diagnosis) -> tuple[str | None, str]:
    """The kind of mistake and how sure it is."""
    return diagnosis.mistake, str(diagnosis.certainty)

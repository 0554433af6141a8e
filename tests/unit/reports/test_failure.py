"""In which way a run failed."""

import pytest

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.failure import Failure, failure_of
from reports.result import (
    Check,
    CheckVerdict,
    Confidence,
    Divergence,
    Finding,
    Mode,
    RankInfo,
    RankVerdict,
    Result,
    Verdict,
)

PLACE = {
    "mode": Mode.RANDOM,
    "stage": Stage.DISPATCH,
    "rank": 1,
    "tensor": "hidden_states",
    "check": "contract: moves",
    "detail": "x",
}


def result(verdict, **found):
    return Result(
        name="x",
        scenario={},
        verdict=verdict,
        as_expected=False,
        summary="x",
        reproduce="x",
        **found,
    )


def diverged(confidence):
    finding = Finding(
        **PLACE, diagnosis="rows exchanged", mistake=Mistake.ROWS_MISPLACED, confidence=confidence
    )
    first = Divergence(**PLACE)
    return result(Verdict.DISCREPANCY, first_divergence=first, findings=[finding])


def ended(state, cause):
    rank = RankInfo(rank=2, node="n", device="cpu", verdict=state, stage=Stage.GEMM1, cause=cause)
    return result(Verdict.FAILED, ranks=[rank])


@pytest.mark.parametrize("verdict", [Verdict.AGREE, Verdict.UNSUPPORTED])
def test_a_run_that_did_not_fail_has_no_way_of_failing(verdict):
    assert failure_of(result(verdict)) is None


def test_a_divergence_is_told_by_stage_check_and_mistake():
    assert failure_of(diverged(Confidence.HIGH)) == Failure(
        verdict=Verdict.DISCREPANCY,
        stage=Stage.DISPATCH,
        check="contract: moves",
        mistake=Mistake.ROWS_MISPLACED,
    )


def test_a_mistake_that_nothing_speaks_for_is_none():
    failure = failure_of(diverged(Confidence.NONE))
    assert failure is not None
    assert failure.mistake is None


@pytest.mark.parametrize(
    ("state", "cause", "expected"),
    [
        (RankVerdict.RAISED, "IndexError: index 7 is out of bounds", "raised IndexError"),
        (RankVerdict.RAISED, "torch.OutOfMemoryError: 3 GiB", "raised torch.OutOfMemoryError"),
        (RankVerdict.HUNG, "no answer for 30 s", "hung"),
        (RankVerdict.DIED, None, "died"),
    ],
)
def test_a_rank_that_ended_is_told_by_how_and_by_the_class_of_its_error(state, cause, expected):
    failure = failure_of(ended(state, cause))
    assert failure == Failure(verdict=Verdict.FAILED, stage=Stage.GEMM1, cause=expected)


def test_checks_that_could_not_judge_are_named_once():
    checks = [
        Check(name=name, mode=Mode.EXACT, verdict=verdict, detail="x")
        for name, verdict in (
            ("band", CheckVerdict.FAILED),
            ("accounts", CheckVerdict.AGREE),
            ("band", CheckVerdict.FAILED),
        )
    ]
    assert failure_of(result(Verdict.FAILED, checks=checks)) == Failure(
        verdict=Verdict.FAILED, check="band"
    )


def test_a_failure_reads_as_one_line():
    line = "discrepancy in dispatch, contract: moves, named rows_misplaced"
    assert str(failure_of(diverged(Confidence.LOW))) == line

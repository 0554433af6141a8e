"""Where a replay parts from what its capsule holds."""

import math

import pytest

from moe.formats import Stage
from reports.capsule_record import Capsule, CapsuleError, parting, read_capsule
from reports.failure import Failure
from reports.result import Divergence, Mode, Result, Verdict

PLACE = {
    "mode": Mode.RANDOM,
    "stage": Stage.COMBINE,
    "rank": 1,
    "token": 3,
    "tensor": "routed",
    "check": "band",
    "detail": "x",
    "got": 0.1,
    "want": 0.2,
}
FAILURE = Failure(verdict=Verdict.DISCREPANCY, stage=Stage.COMBINE, check="band")
DIED = Failure(verdict=Verdict.FAILED, stage=Stage.GEMM1, cause="died")


def capsule(failure=FAILURE, **changed):
    first = Divergence(**{**PLACE, **changed}) if failure is FAILURE else None
    return Capsule(
        failure=failure,
        first_divergence=first,
        shrunk_from="run",
        candidates=1,
        refused=0,
        code="0",
        environment={},
    )


def result(**changed):
    return Result(
        name="x",
        scenario={},
        verdict=Verdict.DISCREPANCY,
        as_expected=False,
        summary="x",
        reproduce="x",
        first_divergence=Divergence(**{**PLACE, **changed}),
    )


def agreeing():
    return result().model_copy(update={"first_divergence": None})


def test_the_same_values_part_nowhere():
    assert parting(capsule(), result(), FAILURE) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rank": 0}, "rank 1 is due, not 0"),
        ({"stage": Stage.TAIL}, "stage combine is due, not tail"),
        ({"got": math.nextafter(0.1, 1)}, "got 0.1 is due, bit for bit, not 0.1"),
        ({"want": None}, "want 0.2 is due, bit for bit, not None"),
    ],
)
def test_another_place_or_a_single_bit_parts(changed, words):
    assert parting(capsule(), result(**changed), FAILURE).startswith(words)


def test_zeros_of_two_signs_are_two_values():
    assert parting(capsule(got=0.0), result(got=-0.0), FAILURE) != ""


def test_nan_is_nan():
    assert parting(capsule(got=math.nan), result(got=math.nan), FAILURE) == ""


def test_another_wording_parts_nowhere():
    assert parting(capsule(), result(detail="said otherwise"), FAILURE) == ""


def test_a_run_that_agrees_parts():
    assert parting(capsule(), agreeing(), None) == f"{FAILURE} is due"


def test_ranks_that_end_alike_part_nowhere():
    assert parting(capsule(DIED), agreeing(), DIED) == ""


def test_ranks_that_end_otherwise_part():
    other = DIED.model_copy(update={"stage": Stage.GEMM2})
    assert parting(capsule(DIED), agreeing(), other) == f"{DIED} is due"


@pytest.mark.parametrize("text", [None, "{}", "no json"])
def test_a_file_that_is_no_capsule_is_named(text, tmp_path):
    if text is not None:
        (tmp_path / "capsule.json").write_text(text)
    with pytest.raises(CapsuleError, match=str(tmp_path / "capsule.json")):
        read_capsule(tmp_path)


def test_a_capsule_is_read_as_it_was_written(tmp_path):
    (tmp_path / "capsule.json").write_text(capsule().model_dump_json())
    assert read_capsule(tmp_path) == capsule()

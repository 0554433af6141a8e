"""What ``run.py shrink`` reads of a result, and where it looks for the failure."""

import pytest

from actors.shrink import CannotShrinkError
from actors.shrinking import failed_result, runtimes_for, values_for
from reports.result import RankInfo, RankVerdict, Result, Verdict
from reports.result_file import write_result


def result(verdict=Verdict.FAILED, ended=RankVerdict.RAISED, runtime="ray", **more):
    rank = RankInfo(rank=0, node="n", device="cpu", verdict=ended)
    scenario = {"run": {"runtime": runtime, "timeout_s": 120.0}, "expect": {}, "compare": "lattice"}
    return Result(
        name="x",
        scenario=scenario,
        verdict=verdict,
        as_expected=False,
        summary="x",
        reproduce="x",
        ranks=[rank],
        **more,
    )


@pytest.mark.parametrize(
    ("ended", "ran_on", "expected"),
    [
        (RankVerdict.RAISED, "ray", ("loopback", "ray")),
        (RankVerdict.RAISED, "loopback", ("loopback",)),
        (RankVerdict.HUNG, "loopback", ("loopback",)),
        (RankVerdict.HUNG, "ray", ("ray",)),
        (RankVerdict.DIED, "ray", ("ray",)),
    ],
)
def test_ranks_that_may_take_the_process_with_them_stay_in_their_own(ended, ran_on, expected):
    assert runtimes_for(result(ended=ended, runtime=ran_on)) == expected


def test_candidates_expect_nothing_and_wait_no_longer_than_there_is_time():
    values = values_for(result(), "loopback", 15.0)
    assert values["run"] == {"runtime": "loopback", "timeout_s": 15.0}
    assert (values["expect"], values["compare"]) == ("agree", None)


def test_a_run_that_agrees_leaves_nothing_to_shrink(tmp_path):
    write_result(result(verdict=Verdict.AGREE), tmp_path / "result.json")
    with pytest.raises(CannotShrinkError, match="nothing to shrink"):
        failed_result(tmp_path / "result.json")

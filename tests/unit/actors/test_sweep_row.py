"""A row runs once more where the machine failed it, and only there."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.session import Session
from actors.sweep_row import RowTask, run_row
from reports.result import RankVerdict, Verdict
from scenarios.loader import load_scenario
from scenarios.sweep_rows import Row

AGREES = SimpleNamespace(verdict=Verdict.AGREE, as_expected=True, summary="agree", ranks=[])


def failed(rank: RankVerdict, *, as_expected: bool = False) -> SimpleNamespace:
    ranks = [SimpleNamespace(verdict=rank)]
    return SimpleNamespace(
        verdict=Verdict.FAILED, as_expected=as_expected, summary=f"failed: {rank}", ranks=ranks
    )


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a row that comes to these results, one after the other."""

    def run_with(*results):
        left = list(results)
        monkeypatch.setattr(Session, "run", lambda *arguments: left.pop(0))
        loaded = load_scenario(Path("scenarios/smoke/ep2_dp.yaml"))
        row = Row(name="one", values={}, selects=())
        ran = run_row(RowTask(row=row, loaded=loaded, folder=tmp_path, session=Session()))
        return ran, len(left)

    return run_with


@pytest.mark.parametrize("how", [RankVerdict.DIED, RankVerdict.HUNG])
def test_a_row_that_lost_a_rank_runs_again_and_keeps_both_attempts(run, how):
    ran, left = run(failed(how), AGREES)
    assert (ran.verdict, left) == ("agree", 0)
    (earlier,) = ran.earlier
    assert (earlier.verdict, earlier.summary) == ("failed", f"failed: {how}")


def test_a_row_runs_no_more_than_twice(run):
    ran, left = run(failed(RankVerdict.DIED), failed(RankVerdict.HUNG), AGREES)
    assert (ran.summary, len(ran.earlier), left) == ("failed: hung", 1, 1)


@pytest.mark.parametrize(
    "result",
    [AGREES, failed(RankVerdict.RAISED), failed(RankVerdict.DIED, as_expected=True)],
    ids=["agrees", "raised", "was to die"],
)
def test_any_other_row_runs_once(run, result):
    ran, left = run(result, AGREES)
    assert (ran.summary, ran.earlier, left) == (result.summary, (), 1)

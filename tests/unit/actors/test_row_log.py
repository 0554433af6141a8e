"""``rows.jsonl``: what is read back, what is dropped, what is refused."""

import pytest

from actors.output import OutputError
from actors.row_log import RowLog, row_digest
from reports.result import Verdict
from reports.sweep_result import RanRow
from scenarios.loader import load_scenario

SMOKE = "scenarios/smoke/ep2_dp.yaml"


def row(name: str, seconds: float = 0.5) -> RanRow:
    return RanRow(
        name=name,
        values={"batch.phase": "extend"},
        verdict=Verdict.AGREE,
        as_expected=True,
        summary="agree: all",
        seconds=seconds,
        result=None,
        earlier=(),
    )


@pytest.fixture
def logged(tmp_path):
    log = RowLog(tmp_path, resume=False)
    log.append(row("one"), "aa")
    log.append(row("two"), "bb")
    return tmp_path


def test_a_row_is_read_back_as_it_was_written(logged):
    assert RowLog(logged, resume=True).ran("two", "bb") == row("two")


def test_a_row_of_another_digest_has_not_run(logged):
    assert RowLog(logged, resume=True).ran("two", "aa") is None


def test_of_a_row_that_ran_twice_the_later_line_counts(logged):
    RowLog(logged, resume=True).append(row("one", 2.0), "cc")
    again = RowLog(logged, resume=True)
    assert (again.ran("one", "aa"), again.ran("one", "cc")) == (None, row("one", 2.0))


def test_without_resume_the_log_starts_empty(logged):
    assert RowLog(logged, resume=False).ran("one", "aa") is None
    assert (logged / "rows.jsonl").read_bytes() == b""


@pytest.mark.parametrize("kept", [1, 20, 60])
def test_a_torn_last_line_is_cut_off_and_the_next_one_whole(logged, kept):
    path = logged / "rows.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:kept])
    log = RowLog(logged, resume=True)
    assert (log.ran("one", "aa"), log.ran("two", "bb")) == (row("one"), None)
    log.append(row("two"), "bb")
    assert path.read_bytes() == first + second


def test_a_row_whose_result_is_gone_runs_again(tmp_path):
    log = RowLog(tmp_path, resume=False)
    log.append(row("one").model_copy(update={"result": "one/result.json"}), "aa")
    assert RowLog(tmp_path, resume=True).ran("one", "aa") is None
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "result.json").touch()
    assert RowLog(tmp_path, resume=True).ran("one", "aa") is not None


def test_a_whole_line_that_is_no_row_is_refused(logged):
    (logged / "rows.jsonl").write_text("{}\n")
    with pytest.raises(OutputError, match=r"rows\.jsonl: a line is no row of a sweep"):
        RowLog(logged, resume=True)


def test_the_digest_follows_every_key_of_the_scenario():
    of_seeds = {row_digest(load_scenario(SMOKE, overrides=[f"inputs.seed={n}"])) for n in (1, 2)}
    assert len(of_seeds) == 2
    assert row_digest(load_scenario(SMOKE)) == row_digest(load_scenario(SMOKE))

"""A stored score: what comes back from its file, what it counts, what it tells a later run."""

from pathlib import Path

import pytest

from moe.faults import VOID_WHERE
from moe.formats import Stage
from moe.mistakes import Mistake
from reports.score import (
    Fate,
    Pair,
    ScenarioScore,
    Score,
    ScoreError,
    fingerprint,
    read_score,
    would_have_failed,
    write_score,
)
from reports.score_tables import COLUMNS, fault_rows, scenario_rows, summary_line

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SCENARIO = {"name": "one", "model": {"preset": "x"}, "run": {"runtime": "ray", "rounds": 1}}
SOURCES = {"code": "1a", "inputs.path": "2b"}
MARK = fingerprint(SCENARIO, SOURCES)
NAMED = Pair(fate=Fate.NAMED, stage=Stage.TAIL, rank=2, mistake=Mistake.SCALING_FACTOR)
PAIRS = {
    "twice": NAMED,
    "blinded": Pair(fate=Fate.KILLED),
    "lost": Pair(fate=Fate.SURVIVED),
    "idle": Pair(fate=Fate.VOID),
    "deadly": Pair(fate=Fate.UNSUPPORTED),
}


def score(**pairs):
    one = ScenarioScore(
        name="one",
        fingerprint=MARK,
        clean="agree: all of it",
        seconds=1.0,
        pairs=pairs or PAIRS,
    )
    return Score(scenarios=[one], environment={}, seconds=1.0)


def test_a_score_comes_back_from_its_file(tmp_path):
    write_score(score(), tmp_path / "score.json")
    assert read_score(tmp_path / "score.json") == score()


def test_a_file_that_is_no_score_is_refused_with_its_name(tmp_path):
    file = tmp_path / "score.json"
    file.write_text("{}")
    with pytest.raises(ScoreError, match=r"score\.json: scenarios: .* moe-assay-score/1"):
        read_score(file)


def test_one_that_is_named_counts_as_localised_and_killed_and_void_ones_not_as_tried():
    (row,) = scenario_rows(score())
    counts = dict(zip(COLUMNS, row[1:], strict=False))
    assert counts == {
        "tried": "3",
        "killed": "2",
        "localised": "1",
        "named": "1",
        "void": "1",
        "unsupported": "1",
        "survived": "1",
    }
    assert row[-1] == "lost"


def test_the_table_of_faults_says_where_one_survived():
    rows = {row[0]: row for row in fault_rows(score())}
    assert (rows["lost"][-1], rows["twice"][-1]) == ("one", "")


def test_the_line_names_faults_that_acted_nowhere():
    assert "acted nowhere: idle, deadly" in summary_line(score())


def test_a_score_with_a_survivor_or_an_unclean_scenario_is_not_complete():
    unclean = score().model_copy(
        update={"scenarios": (score().scenarios[0].model_copy(update={"pairs": {}}),)}
    )
    assert score(twice=NAMED).is_complete
    assert not score().is_complete
    assert not unclean.is_complete
    assert "agree: all of it" in scenario_rows(unclean)[0][-1]


def test_a_run_of_a_scored_scenario_learns_where_faults_would_have_shown():
    assert list(would_have_failed(score(), MARK)) == [
        "with fault twice this run would have failed in stage tail on rank 2",
        "with fault blinded this run would have failed",
    ]


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({"name": "other"}, True),
        ({"expect": "failed"}, True),
        ({"run": {"runtime": "loopback", "rounds": 1}}, True),
        ({"run": {"runtime": "ray", "rounds": 3}}, False),
        ({"model": {"preset": "y"}}, False),
    ],
    ids=str,
)
def test_what_is_computed_and_judged_makes_the_fingerprint(changed, is_same):
    told = list(would_have_failed(score(), fingerprint(SCENARIO | changed, SOURCES)))
    assert bool(told) is is_same


@pytest.mark.parametrize(
    "changed", [{"code": "3c"}, {"inputs.path": "3c"}, {"model.weights": "4d"}]
)
def test_other_code_or_other_files_are_another_run(changed):
    other = fingerprint(SCENARIO, SOURCES | changed)
    assert not list(would_have_failed(score(), other))


def test_a_score_in_which_everything_is_void_is_not_complete():
    void = Pair(fate=Fate.VOID, reason="found nothing to act on")
    assert not score(idle=void, idler=void).is_complete


def test_no_fault_survives_in_the_committed_score_and_none_is_void_that_acts_everywhere():
    committed = read_score(RESULTS / "score.json")
    assert committed.is_complete
    everywhere = {name for name, where in VOID_WHERE.items() if where == "nowhere"}
    assert not {n for n in everywhere if committed.by_fault().get(n, {}).get(Fate.VOID)}

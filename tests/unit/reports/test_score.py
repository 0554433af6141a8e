"""A stored score: what comes back from its file, what it counts, what it tells a later run."""

from pathlib import Path

import pytest

from moe.faults import FAULTS, VOID_WHERE
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


SEEN = {Fate.KILLED, Fate.LOCALISED, Fate.NAMED}
OF_NO_PLACE = "checker_blinded"


@pytest.fixture(scope="module")
def committed():
    """Fault -> fate -> in how many scenarios, of the committed score."""
    return read_score(RESULTS / "score.json").by_fault()


def test_every_fault_that_acts_anywhere_is_killed_somewhere(committed):
    acts = {name for name, counts in committed.items() if counts.keys() & {*SEEN, Fate.SURVIVED}}
    assert {name for name in acts if not counts_of(committed, [name], SEEN)} == set()


def test_no_fault_is_void_that_acts_everywhere(committed):
    everywhere = {name for name, where in VOID_WHERE.items() if where == "nowhere"}
    assert not {name for name in everywhere if committed.get(name, {}).get(Fate.VOID)}


def test_of_the_pairs_that_act_as_many_are_seen_as_is_claimed(committed):
    names = [name for name in committed if name != OF_NO_PLACE]
    tried = counts_of(committed, names, {*SEEN, Fate.SURVIVED})
    placed = counts_of(committed, names, {Fate.LOCALISED, Fate.NAMED})
    known = [name for name in names if FAULTS[name].mistakes]
    assert counts_of(committed, names, SEEN) / tried >= 0.98
    assert placed / tried >= 0.95
    assert counts_of(committed, known, {Fate.NAMED}) / counts_of(committed, known, SEEN) >= 0.9


def counts_of(committed, names, fates):
    return sum(committed[name].get(fate, 0) for name in names for fate in fates)

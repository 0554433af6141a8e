"""The comparison with others' tolerances: each is what it says, and the page has the figures."""

import json

import pytest
import torch

from benchmarks.other_judges import CLEAN, OTHERS, OURS, PAGE, ROOT, TRIED, compare, renewed, table
from moe.faults import FAULTS
from tests.mutation.worlds import load

WANT = torch.ones(100, 64, dtype=torch.float64)


def but(rows, columns, value):
    got = WANT.clone()
    got[:rows, :columns] = value
    return got


@pytest.mark.parametrize(
    ("got", "objecting"),
    [
        (WANT, []),
        (WANT * 0.96, []),
        (but(1, 1, 1.5), ["allclose 3e-2"]),
        (but(1, 64, 0.0), ["calc_diff < 1e-3", "allclose 3e-2"]),
        (but(2, 64, 0.0), ["calc_diff < 1e-3", "allclose 3e-2", "99 % within 2e-1"]),
        (but(1, 1, torch.nan), ["calc_diff < 1e-3", "allclose 3e-2"]),
    ],
    ids=["equal", "4 % less", "a cell", "a token", "two tokens", "a NaN"],
)
def test_a_judge_objects_to_what_its_tolerance_does_not_hold(got, objecting):
    assert [judge for judge, objects in OTHERS.items() if objects(got, WANT)] == objecting


def test_void_faults_are_not_tried_and_this_verdict_catches_all_that_are(monkeypatch):
    few = ["tokens_swapped", "count_off_by_one", "placement_ignored", "combine_skipped"]
    monkeypatch.setattr("benchmarks.other_judges.FAULTS", {name: FAULTS[name] for name in few})
    counts = compare(load("a2a"))
    assert counts["ROW_MAPS", TRIED] == counts["ROW_MAPS", OURS] == 1
    assert counts["COUNTS", TRIED] == counts["COUNTS", OURS] == 1
    assert not any(counts["COUNTS", judge] for judge in OTHERS)
    assert (counts[CLEAN, TRIED], counts[CLEAN, OURS]) == (1, 0)
    assert {kind for kind, _ in counts} == {"ROW_MAPS", "COUNTS", CLEAN}


def test_the_page_has_the_measured_figures():
    measured = json.loads((ROOT / "benchmarks" / "results" / "other_judges.json").read_text())
    page = PAGE.read_text()
    assert table(measured["counts"]) in page
    assert renewed(page, measured["counts"]) == page

"""What an agree could have seen: effects at twice the stated size are flagged, of every kind."""

from pathlib import Path

import pytest
import torch

from benchmarks.visible_effects import KINDS, Clean, clean_run, is_flagged, rates
from moe.formats import Stage
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from reports.verdict.sight import sight_of
from reports.verdict.tallies import Group, Kind, Tally
from tests.verdict.stored_cells import DECLARED, drawn, judged

TRIALS = 12


@pytest.fixture(scope="module", name="run")
def _run() -> Clean:
    return clean_run(Path("scenarios/smoke/ep2_dp.yaml"), seed=3)


def test_a_clean_forward_is_not_flagged(run):
    assert not run.flagged


def test_nearly_all_effects_of_twice_the_stated_size_are_flagged(run):
    found = {(stage, kind): rate for stage, kind, rate in rates([run], TRIALS)}
    assert {kind for _, kind in found} == set(KINDS)
    assert sum(found.values()) / len(found) >= 0.95
    assert min(found.values()) >= 0.75  # 3 of 12 missed at a rate of 0.05: one in fifty


def test_nothing_is_flagged_where_there_is_no_effect(run):
    draw = torch.Generator().manual_seed(1)
    for kind in KINDS:
        assert not any(is_flagged(run, Stage.GEMM2, kind, 0.0, draw) for _ in range(TRIALS))


def test_effects_of_a_tenth_of_the_stated_size_are_mostly_missed(run):
    found = [rate for _, kind, rate in rates([run], TRIALS, factor=0.1) if kind in ("cell", "row")]
    assert sum(found) / len(found) < 0.5


def test_a_cell_shows_half_a_last_place():
    (sight,) = sight_of(judged(seed=0)).values()
    # A step is 2^-7 to 2^-8 of a value; half of what 95 of 100 cells show.
    assert 2.0**-9 < sight.cell < 2.0**-7


def test_more_cells_show_less():
    (sight,) = sight_of(judged(seed=0)).values()
    effects = [sight.cell, sight.row, sight.by_kind[Kind.EXPERT], sight.by_kind[Kind.RANK]]
    assert effects == sorted(effects, reverse=True)


def test_steps_that_lean_show_what_no_cell_does():
    (sight,) = sight_of(judged(seed=0)).values()
    assert sight.by_kind[Kind.RANK] < DECLARED / 4


def test_cells_that_are_all_zero_show_nothing():
    (sight,) = sight_of(judged(seed=0, want=0 * drawn(0))).values()
    assert (sight.cell, sight.row, sight.by_kind) == (None, None, {})


def test_a_row_without_values_hides_no_other():
    want = drawn(0)
    want[0] = 0
    (sight,) = sight_of(judged(seed=0, want=want)).values()
    (whole,) = sight_of(judged(seed=0)).values()
    assert sight.row == pytest.approx(whole.row, rel=0.5)


def test_nothing_compared_shows_nothing():
    assert sight_of(Ledger()) == {}


def test_rows_that_ranks_have_in_common_count_once():
    tally = Tally(columns=128, stored=True)
    for rank in (0, 1):
        tally.count(Rows.of_rank(rank, 3, torch.tensor([4, 5, 6])))
    assert tally.shape_of(Group(Kind.COLUMNS, 0)) == (3, 128)
    assert tally.sums[Group(Kind.COLUMNS, 0)].units == 6

"""Small errors that no cell shows: steps of a rank, an expert or some columns that all lean."""

import re

import pytest
import torch

from moe.formats import Stage
from reports.verdict.compared import check_stored
from reports.verdict.distribution import DISTRIBUTION, check_distribution, evidence_needed
from reports.verdict.ledger import Ledger
from tests.verdict.stored_cells import EXPERTS, RANKS, drawn, judged, some_rows, to_nearest

GEMM2 = (Stage.GEMM2, "output")

SMALL = 1 + 2.0**-15
"""A gain under the declared noise, so that every cell is one that may be stored."""


def leaning(seed=0, mistake=lambda values: values, **how):
    ledger = judged(seed, mistake, **how)
    assert ledger.deviations == []
    check_distribution(ledger)
    return ledger.deviations


def on(which, factor=SMALL):
    """A gain on some rows."""

    def mistake(values):
        rows = which(some_rows())
        return torch.where(rows[:, None], values * factor, values)

    return mistake


@pytest.mark.parametrize("seed", range(60))
def test_errors_without_a_preferred_sign_are_no_finding(seed):
    assert leaning(seed) == []


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_small_gain_of_one_rank_is_found_on_that_rank(rank):
    (found,) = leaning(mistake=on(lambda rows: rows.rank == rank))
    assert (found.check, found.rank, found.expert) == (DISTRIBUTION, rank, None)


@pytest.mark.parametrize("expert", range(EXPERTS))
def test_a_small_gain_of_one_expert_is_found_at_that_expert(expert):
    (found,) = leaning(mistake=on(lambda rows: rows.expert == expert))
    assert (found.rank, found.expert) == (expert // 2, expert)


@pytest.mark.parametrize("block", range(4))
def test_a_small_gain_of_one_column_block_is_found_in_its_columns(block):
    def mistake(values):
        values[:, 128 * block : 128 * (block + 1)] *= SMALL
        return values

    (found,) = leaning(mistake=mistake)
    assert found.columns == (128 * block, 128 * (block + 1))


def test_columns_are_blamed_on_the_rank_that_leans_most():
    def mistake(values):
        rows = some_rows().rank == 2
        values[rows, :256] *= 1 + 2.0**-14
        values[~rows, :128] *= 1 + 2.0**-18
        return values

    (found,) = leaning(mistake=mistake)
    assert found.rank == 2


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda values: values * SMALL, "away from zero"),
        (lambda values: values * (2 - SMALL), "towards zero"),
        (lambda values: values + values.abs() * (SMALL - 1), " up "),
        (lambda values: values - values.abs() * (SMALL - 1), " down "),
    ],
    ids=["larger", "smaller", "up", "down"],
)
def test_the_finding_says_which_way(mistake, words):
    (found,) = leaning(mistake=mistake)
    assert words in found.detail


@pytest.mark.parametrize("gain", [2.0**-14, 2.0**-15])
def test_the_finding_says_how_large_an_error_it_is(gain):
    (found,) = leaning(mistake=on(lambda rows: rows.rank == 1, 1 + gain))
    stated = float(re.search(r"error of (\S+) of each", found.detail)[1])
    assert gain / 2 < stated < 2 * gain


def test_the_finding_counts_the_groups_that_lean():
    (found,) = leaning(mistake=on(lambda rows: rows.rank == 1))
    assert "1 of 4 ranks" in found.detail


def test_an_error_that_may_have_one_sign_by_declaration_is_no_finding():
    assert leaning(mistake=lambda values: values * SMALL, drawn_signs=False) == []


def test_errors_that_may_have_one_sign_are_not_asked_for():
    ledger = judged(0, drawn_signs=False)
    check_distribution(ledger)
    assert DISTRIBUTION not in ledger.asked
    assert all(sums.outward_squares == 0 for sums in ledger.tallies[GEMM2].sums.values())


def test_rows_that_are_the_same_count_once():
    row = drawn(3)[:1]
    same = row.expand(RANKS * 48, -1).contiguous()

    def one_sign(values):
        return same + same.abs() * 2.0**-15

    assert leaning(mistake=one_sign, want=same) == []


def test_a_tensor_with_a_broken_cell_is_not_asked():
    def broken(values):
        values = values * SMALL
        values[0, 0] *= 2
        return values

    ledger = judged(0, broken)
    check_distribution(ledger)
    assert {one.check for one in ledger.deviations} == {"band"}


def test_nothing_is_asked_where_nothing_is_stored():
    ledger = Ledger()
    check_distribution(ledger)
    assert (ledger.deviations, ledger.asked) == ([], set())


def test_a_blinded_check_reports_nothing():
    ledger = judged(0, lambda values: values * SMALL)
    blind = Ledger(blinded=frozenset({DISTRIBUTION}), tallies=ledger.tallies)
    check_distribution(blind)
    assert blind.deviations == []


def test_more_groups_need_more_evidence():
    ledger = judged(0)
    # 4 ranks, 8 experts and 4 blocks, each in 4 directions, at 1e-6 for all of them: ln(64e6)
    assert evidence_needed(ledger) == pytest.approx(17.9744, abs=1e-4)


def test_steps_of_cells_that_may_overflow_are_not_counted():
    ledger, want = Ledger(), drawn(0)
    check_stored(
        ledger,
        Stage.GEMM2,
        "output",
        some_rows(),
        got=to_nearest(want * 1.02),
        want=want,
        noise=torch.full_like(want, torch.inf),
        signs_are_drawn=True,
    )
    check_distribution(ledger)
    assert ledger.deviations == []

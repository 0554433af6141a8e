"""Columns of a row that are another row's, or another part of its own."""

import pytest
import torch

from moe.formats import Stage
from tests.verdict.diagnoses import diagnosed, named

RANK = 2
GATE_UP = (Stage.GEMM1, "gate_up")
ROUTED = (Stage.COMBINE, "routed")


def changed(run, where, change):
    stage, name = where
    rows = run.tensor(stage, RANK, name).clone()
    change(rows)
    return diagnosed(run, stage, RANK, {name: rows})


def test_a_row_with_the_first_columns_of_another_names_it(clean_ue8m0):
    def half(rows):
        rows[3, :128] = rows[4, :128]

    found = changed(clean_ue8m0, ROUTED, half)
    assert named(found) == ("rows_misplaced", "high")
    assert found.words.startswith("columns 0..127 are another row's: ")


@pytest.mark.parametrize(("to", "source"), [(0, 128), (128, 0), (64, 160)])
def test_columns_of_another_part_of_the_row_name_it(clean_ue8m0, to, source):
    route = clean_ue8m0.route(RANK)

    def shift(rows):
        rows[route.row, to : to + 64] = rows[route.row, source : source + 64].clone()

    found = changed(clean_ue8m0, GATE_UP, shift)
    assert named(found) == ("tail_columns", "high")
    assert f"columns {to}..{to + 63} hold what is due in columns {source}..{source + 63}" in (
        found.words
    )


def test_columns_of_noise_are_nobodys(clean_ue8m0):
    def noise(rows):
        rows[3, :128] = torch.randn(128, generator=torch.Generator().manual_seed(1))

    assert named(changed(clean_ue8m0, ROUTED, noise)) == (None, "none")


def test_columns_of_another_row_in_another_place_are_nobodys(clean_ue8m0):
    def moved(rows):
        rows[3, :96] = rows[4, 128:224]

    assert named(changed(clean_ue8m0, ROUTED, moved)) == (None, "none")

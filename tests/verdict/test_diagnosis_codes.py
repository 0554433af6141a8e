"""Codes that were made by another scale than the stored one, in a whole layer."""

import pytest
import torch
from torch import Tensor

from moe.formats import ScaleFormat, Stage
from moe.quant.fp8 import quantize_groups
from reports.verdict.rows import take_rows
from tests.verdict.diagnoses import diagnosed, named

RANK = 2
PLACE = (Stage.ACTIVATION, RANK, "hidden_states")


def with_codes(run, row: int, codes: Tensor) -> Tensor:
    """The quantised activation with other codes [C] in one row."""
    spoiled = run.tensor(*PLACE).view(torch.uint8).clone()
    spoiled[row] = codes.view(torch.uint8)
    return spoiled.view(torch.float8_e4m3fn)


def of_codes(run, codes: Tensor):
    row = run.route(RANK).row
    spoiled = with_codes(run, row, codes)
    return diagnosed(run, *PLACE[:2], {"hidden_states": spoiled})


def source(run) -> Tensor:
    """[1, I] bf16 that is quantised in the row of the first route."""
    rows = run.tensor(Stage.ACTIVATION, RANK, "activation")
    return take_rows(rows, torch.tensor([run.route(RANK).row])).to(torch.bfloat16)


def test_codes_of_the_exact_scale_are_late_and_sized(clean_ue8m0):
    exact = quantize_groups(source(clean_ue8m0), ScaleFormat.FP32).values[0]
    found = of_codes(clean_ue8m0, exact)
    assert named(found) == ("scale_late", "high")
    assert "times too large on average" in found.words


@pytest.mark.parametrize("gain", [1.1, 0.8])
def test_codes_of_larger_or_smaller_values_are_not_late(clean_ue8m0, gain):
    rows = (gain * source(clean_ue8m0).float()).to(torch.bfloat16)
    codes = quantize_groups(rows, ScaleFormat.UE8M0).values[0]
    assert named(of_codes(clean_ue8m0, codes)) == (None, "none")


def test_codes_of_another_route_name_it(clean_ue8m0):
    run = clean_ue8m0
    route = run.route(RANK)
    other = run.route_of_another_token(RANK, route)
    codes = run.tensor(*PLACE).view(torch.uint8)[other.row].view(torch.float8_e4m3fn)
    found = of_codes(run, codes)
    assert named(found) == ("rows_misplaced", "high")
    assert f"token {route.token} slot {route.slot} holds token {other.token}" in found.words

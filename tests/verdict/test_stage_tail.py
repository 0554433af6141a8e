"""Combine and tail: one spoiled tensor is found at its stage and named."""

import pytest
import torch

from moe.formats import Stage

BF16_CELLS = [
    (Stage.COMBINE, "routed"),
    (Stage.TAIL, "shared.gate_up"),
    (Stage.TAIL, "shared.activation"),
    (Stage.TAIL, "shared.output"),
    (Stage.TAIL, "output"),
]
SHARED_CODES = ["shared.input", "shared.hidden_states"]


@pytest.mark.parametrize(("stage", "name"), BF16_CELLS, ids=lambda value: str(value))
def test_a_cell_two_last_places_off_is_found_and_located(clean, last_places, stage, name):
    rank = clean.last_rank
    tensor = clean.tensor(stage, rank, name)
    column = int(tensor[1].float().abs().argmax())
    first = clean.first(stage, rank, name, last_places(tensor, 1, column, 2))
    assert (first.check, first.stage, first.rank, first.tensor) == ("band", stage, rank, name)
    assert (first.token, first.slot, first.expert) == (clean.own_token(rank, 1), None, None)
    assert first.columns[0] <= column < first.columns[1]


@pytest.mark.parametrize("name", SHARED_CODES)
def test_a_code_of_the_shared_expert_one_step_off_is_found(quantised, last_places, name):
    codes = quantised.tensor(Stage.TAIL, 0, name)
    column = int(codes[1].float().abs().argmax())
    first = quantised.first(Stage.TAIL, 0, name, last_places(codes, 1, column, -1))
    assert (first.check, first.stage, first.rank) == ("quantiser rule", Stage.TAIL, 0)
    assert (first.tensor, first.token) == (name, 1)


@pytest.mark.parametrize("name", SHARED_CODES)
@pytest.mark.parametrize("exponents", [1, -1])
def test_a_scale_of_the_shared_expert_of_another_exponent_is_found(
    quantised, scaled_row, name, exponents
):
    scale = scaled_row(quantised.tensor(Stage.TAIL, 0, f"{name}_scale"), 1, exponents)
    first = quantised.first(Stage.TAIL, 0, f"{name}_scale", scale)
    assert (first.check, first.stage, first.rank) == ("quantiser rule", Stage.TAIL, 0)
    assert (first.tensor, first.token) == (f"{name}_scale", 1)


@pytest.mark.parametrize(("stage", "name"), BF16_CELLS, ids=lambda value: str(value))
def test_nan_in_a_token_is_found(clean, stage, name):
    spoiled = clean.tensor(stage, 0, name).clone()
    spoiled[1, 4] = torch.nan
    first = clean.first(stage, 0, name, spoiled)
    assert (first.stage, first.rank, first.token) == (stage, 0, 1)

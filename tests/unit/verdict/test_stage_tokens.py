"""Glue, route, combine and tail: each objects to one spoiled tensor and names it."""

import pytest
import torch

from moe.formats import Stage

U32 = 2.0**-24
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


@pytest.mark.parametrize(("share", "found"), [(0.75, False), (3.0, True)])
def test_a_logit_is_judged_by_the_sum_of_its_own_products(clean, share, found):
    rank = clean.last_rank
    x = clean.tensor(Stage.GLUE_IN, rank, "hidden_states")[1].double()
    gate = clean.tensor(Stage.WEIGHTS, rank, "gate_weight")[2].double()
    roundings = 255 + len(x) // 256 - 1  # sums of 256 products, added one by one
    band = roundings * U32 * float((x * gate).abs().sum())
    logits = clean.tensor(Stage.ROUTE, rank, "logits").double()
    logits[1, 2] = float(x @ gate) + share * band
    traces = clean.changed(Stage.ROUTE, rank, {"logits": logits})
    found_at = [d for d in clean.judged(traces).deviations if d.check == "band"]
    assert [(d.stage, d.rank, d.tensor, d.token) for d in found_at if d.tensor == "logits"] == (
        [(Stage.ROUTE, rank, "logits", clean.own_token(rank, 1))] if found else []
    )


@pytest.mark.parametrize(("roundings", "found"), [(12, False), (90, True)])
def test_a_topk_weight_is_judged_by_its_own_roundings(clean, roundings, found):
    rank = clean.last_rank
    weights = clean.tensor(Stage.ROUTE, rank, "topk_weights").double()
    weights[1, 0] *= 1 + roundings * U32
    traces = clean.changed(Stage.ROUTE, rank, {"topk_weights": weights})
    found_at = [d for d in clean.judged(traces).deviations if d.check == "band"]
    assert [(d.stage, d.rank, d.token) for d in found_at if d.tensor == "topk_weights"] == (
        [(Stage.ROUTE, rank, clean.own_token(rank, 1))] if found else []
    )


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


@pytest.mark.parametrize("stage", [Stage.GLUE_IN, Stage.GLUE_OUT])
def test_one_bit_changed_by_the_glue_is_a_broken_move(clean, last_places, stage):
    rank = clean.last_rank
    rows = last_places(clean.tensor(stage, rank, "hidden_states"), 2, 5, 1)
    first = clean.first(stage, rank, "hidden_states", rows)
    assert (first.check, first.stage, first.rank) == ("contract: moves", stage, rank)
    assert first.token == clean.own_token(rank, 2)


def test_rows_of_another_dtype_are_a_broken_move_even_with_equal_values(clean):
    rows = clean.tensor(Stage.GLUE_OUT, 0, "hidden_states")
    traces = clean.changed(Stage.GLUE_OUT, 0, {"hidden_states": rows.to(torch.float32)})
    deviations = clean.judged(traces).deviations
    assert {(d.stage, d.tensor) for d in deviations} == {(Stage.GLUE_OUT, "hidden_states")}
    assert "contract: moves" in {d.check for d in deviations}


@pytest.mark.parametrize(("stage", "name"), BF16_CELLS, ids=lambda value: str(value))
def test_nan_in_a_token_is_found(clean, stage, name):
    spoiled = clean.tensor(stage, 0, name).clone()
    spoiled[1, 4] = torch.nan
    first = clean.first(stage, 0, name, spoiled)
    assert (first.stage, first.rank, first.token) == (stage, 0, 1)

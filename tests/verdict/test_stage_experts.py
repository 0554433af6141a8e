"""Dispatch, permutes, GEMMs and activation: each objects to one spoiled tensor and names it."""

import pytest
import torch

from moe.formats import Stage
from moe.quant.ue8m0 import mn_major

CELLS = {Stage.GEMM1: "gate_up", Stage.ACTIVATION: "activation", Stage.GEMM2: "output"}
CODES = {Stage.DISPATCH: "wire", Stage.ACTIVATION: "hidden_states"}


@pytest.mark.parametrize("stage", CELLS)
def test_a_grouped_cell_two_last_places_off_is_found_and_located(clean, last_places, stage):
    name, rank, route = CELLS[stage], clean.last_rank, clean.route(clean.last_rank, index=1)
    tensor = clean.tensor(stage, rank, name)
    column = int(tensor[route.row].float().abs().argmax())
    first = clean.first(stage, rank, name, last_places(tensor, route.row, column, 2))
    assert (first.check, first.stage, first.rank, first.tensor) == ("band", stage, rank, name)
    assert (first.token, first.slot, first.expert) == (route.token, route.slot, route.expert)
    assert first.columns[0] <= column < first.columns[1] <= first.columns[0] + 128


def test_a_partial_two_last_places_off_is_found_and_located(clean, last_places):
    rank = clean.last_rank
    partial = clean.tensor(Stage.POST_PERMUTE, rank, "partial")
    column = int(partial[1].float().abs().argmax())
    first = clean.first(Stage.POST_PERMUTE, rank, "partial", last_places(partial, 1, column, 2))
    assert (first.check, first.stage, first.rank) == ("band", Stage.POST_PERMUTE, rank)
    assert first.token == clean.received_token(rank, 1)


@pytest.mark.parametrize("stage", CODES)
@pytest.mark.parametrize("places", [1, -1])
def test_a_code_one_step_off_breaks_the_quantiser_rule(quantised, last_places, stage, places):
    name, route = CODES[stage], quantised.route(0)
    row = route.row if stage is Stage.ACTIVATION else 1
    codes = quantised.tensor(stage, 0, name)
    column = _code_under_448(codes, row)
    first = quantised.first(stage, 0, name, last_places(codes, row, column, places))
    assert (first.check, first.stage, first.rank) == ("quantiser rule", stage, 0)
    assert first.tensor == name
    assert first.token == (route.token if stage is Stage.ACTIVATION else 1)


def _code_under_448(codes, row):
    """A column whose code has a neighbour on both sides."""
    values = codes[row].float().abs()
    return int(values.masked_fill(values >= 448, 0).argmax())


@pytest.mark.parametrize("stage", CODES)
@pytest.mark.parametrize("exponents", [1, -1])
def test_a_scale_of_another_exponent_breaks_the_quantiser_rule(
    quantised, scaled_row, stage, exponents
):
    name = f"{CODES[stage]}_scale"
    row = quantised.route(0).row if stage is Stage.ACTIVATION else 0
    scale = scaled_row(quantised.tensor(stage, 0, name), row, exponents)
    first = quantised.first(stage, 0, name, scale)
    assert (first.check, first.stage, first.rank) == ("quantiser rule", stage, 0)
    assert first.tensor == name
    assert first.got == pytest.approx(first.want * 2.0**exponents, rel=2.0**-22)


@pytest.mark.parametrize(("last", "found"), [(1, False), (3, True)])
def test_an_fp32_scale_may_be_one_last_place_off_and_no_more(clean_fp32, last_places, last, found):
    route = clean_fp32.route(0)
    moved = last_places(_nearest_scale(clean_fp32, route.row), route.row, 0, last)
    traces = clean_fp32.changed(Stage.ACTIVATION, 0, {"hidden_states_scale": moved})
    at_scale = [
        one
        for one in clean_fp32.judged(traces).deviations
        if one.stage is Stage.ACTIVATION and one.tensor == "hidden_states_scale"
    ]
    assert bool(at_scale) is found


def _nearest_scale(clean, row):
    """The traced scales, with the correctly rounded amax / 448 at one row."""
    scale = clean.tensor(Stage.ACTIVATION, 0, "hidden_states_scale").clone()
    amax = clean.tensor(Stage.ACTIVATION, 0, "activation")[row, :128].double().abs().max()
    scale[row, 0] = (amax / 448).float()
    return scale


def test_exchanged_received_rows_are_a_broken_move(clean):
    rank = clean.last_rank
    rows = clean.tensor(Stage.DISPATCH, rank, "hidden_states")
    first = clean.first(Stage.DISPATCH, rank, "hidden_states", _exchanged(rows, 0, 1))
    assert (first.check, first.stage, first.rank) == ("contract: moves", Stage.DISPATCH, rank)
    assert first.tensor == "hidden_states"
    assert first.token in {clean.received_token(rank, 0), clean.received_token(rank, 1)}
    assert first.rows == 2


def test_exchanged_grouped_rows_are_a_broken_move(clean):
    rank = clean.last_rank
    routes = [clean.route(rank), clean.route_of_another_token(rank, clean.route(rank))]
    name = "rows.hidden_states"
    rows = _exchanged(clean.tensor(Stage.PRE_PERMUTE, rank, name), *(r.row for r in routes))
    first = clean.first(Stage.PRE_PERMUTE, rank, name, rows)
    assert (first.check, first.stage, first.rank) == ("contract: moves", Stage.PRE_PERMUTE, rank)
    assert first.token in {route.token for route in routes}


def _exchanged(rows, one, other):
    order = torch.arange(rows.shape[0])
    order[[one, other]] = order[[other, one]]
    return rows.view(torch.uint8)[order].view(rows.dtype)


@pytest.mark.parametrize("name", ["topk_ids", "topk_weights"])
def test_received_routes_that_were_not_sent_are_a_broken_move(clean, name):
    route = clean.route(0)
    spoiled = clean.tensor(Stage.DISPATCH, 0, name).clone()
    spoiled[route.received, route.slot] = 1 - spoiled[route.received, route.slot]
    traces = clean.changed(Stage.DISPATCH, 0, {name: spoiled})
    moves = [d for d in clean.judged(traces).deviations if d.check == "contract: moves"]
    assert (moves[0].stage, moves[0].rank, moves[0].tensor) == (Stage.DISPATCH, 0, name)
    assert moves[0].token == route.token


def test_a_grouped_row_under_another_expert_is_found_at_pre_permute(clean):
    rank, route = clean.last_rank, clean.route(clean.last_rank)
    experts = clean.tensor(Stage.PRE_PERMUTE, rank, "rows.m_indices").clone()
    experts[route.row] = 1 - experts[route.row]
    traces = clean.changed(Stage.PRE_PERMUTE, rank, {"rows.m_indices": experts})
    first = clean.judged(traces).deviations[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.PRE_PERMUTE, rank, "rows")
    assert (first.token, first.slot, first.expert) == (route.token, route.slot, route.expert)


@pytest.mark.parametrize("stage", CELLS)
def test_nan_in_a_live_row_is_found(clean, stage):
    route = clean.route(0)
    spoiled = clean.tensor(stage, 0, CELLS[stage]).clone()
    spoiled[route.row, 3] = torch.nan
    first = clean.first(stage, 0, CELLS[stage], spoiled)
    assert (first.stage, first.rank, first.token) == (stage, 0, route.token)
    assert first.ratio == float("inf")


@pytest.mark.parametrize("stage", CELLS)
def test_what_padding_rows_hold_is_nobodys_business(clean, stage):
    tensor = clean.tensor(stage, 0, CELLS[stage]).clone()
    index = clean.tensor(Stage.PRE_PERMUTE, 0, "restore.output_index")
    padding = torch.ones(tensor.shape[0], dtype=torch.bool)
    padding[index[index >= 0]] = False
    tensor[padding] = 7.0
    assert clean.judged(clean.changed(stage, 0, {CELLS[stage]: tensor})).deviations == []


def test_scales_in_another_layout_with_equal_values_move_no_value_check(clean_ue8m0):
    name = "rows.hidden_states_scale"
    scale = mn_major(clean_ue8m0.tensor(Stage.PRE_PERMUTE, 0, name))
    assert (
        clean_ue8m0.judged(clean_ue8m0.changed(Stage.PRE_PERMUTE, 0, {name: scale})).deviations
        == []
    )

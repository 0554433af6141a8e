"""Rows of others, rows that nobody wrote, columns of others: named, and told from mere noise."""

import pytest
import torch

from moe.formats import ScaleFormat, Stage
from moe.quant.fp8 import quantize_groups
from reports.verdict.rows import take_rows
from tests.verdict.diagnoses import diagnosed, named

RANK = 2
RECEIVED = (Stage.DISPATCH, RANK)


def rows_of(run, stage, rank, name, order):
    """A tensor with its first rows in another order."""
    tensor = run.tensor(stage, rank, name)
    index = torch.arange(len(tensor))
    index[: len(order)] = torch.tensor(order)
    return take_rows(tensor, index)


def of_received(run, order):
    moved = {n: rows_of(run, *RECEIVED, n, order) for n in ("hidden_states", "hidden_states_scale")}
    return diagnosed(run, *RECEIVED, moved)


def test_two_rows_in_each_others_place_are_exchanged(clean_ue8m0):
    found = of_received(clean_ue8m0, [1, 0])
    assert named(found) == ("rows_misplaced", "high")
    tokens = [clean_ue8m0.received_token(RANK, row) for row in (0, 1)]
    assert found.words.startswith("rows exchanged: ")
    assert f"token {tokens[0]} holds token {tokens[1]}" in found.words


def test_rows_one_further_on_are_misplaced_and_say_whose_they_are(clean_ue8m0):
    found = of_received(clean_ue8m0, [1, 2, 3, 0])
    assert named(found) == ("rows_misplaced", "high")
    assert found.words.startswith("rows misplaced: ")


def test_one_identified_row_does_not_explain_rows_of_zeros(clean_ue8m0):
    codes = clean_ue8m0.tensor(*RECEIVED, "hidden_states").view(torch.uint8).clone()
    codes[0] = codes[1]
    codes[2:5] = 0
    found = diagnosed(clean_ue8m0, *RECEIVED, {"hidden_states": codes.view(torch.float8_e4m3fn)})
    assert found.certainty != "high"


def test_a_row_of_noise_is_nobodys(clean_ue8m0):
    codes = clean_ue8m0.tensor(*RECEIVED, "hidden_states")
    noise = torch.randn(1, codes.shape[1], generator=torch.Generator().manual_seed(3))
    values = quantize_groups(noise.to(torch.bfloat16), ScaleFormat.UE8M0).values
    spoiled = codes.view(torch.uint8).clone()
    spoiled[3] = values.view(torch.uint8)[0]
    found = diagnosed(clean_ue8m0, *RECEIVED, {"hidden_states": spoiled.view(codes.dtype)})
    assert named(found) == (None, "none")


def test_a_row_that_ends_as_another_begins_is_overwritten(clean_ue8m0):
    codes = clean_ue8m0.tensor(*RECEIVED, "hidden_states").view(torch.uint8).clone()
    codes[0, -32:] = codes[1, :32]
    spoiled = codes.view(torch.float8_e4m3fn)
    found = diagnosed(clean_ue8m0, *RECEIVED, {"hidden_states": spoiled})
    assert named(found) == ("tail_columns", "high")
    assert "columns from 224 on overwritten by another row" in found.words


def test_the_last_rows_of_an_expert_that_nobody_wrote_are_named(clean_ue8m0):
    run, placed = clean_ue8m0, [clean_ue8m0.route(RANK, number).row for number in range(26)]
    output = run.tensor(Stage.GEMM2, RANK, "output").clone()
    last = max(row for row in placed if row < 128)
    output[last] = torch.nan
    found = diagnosed(run, Stage.GEMM2, RANK, {"output": output})
    assert named(found) == ("tail_rows", "low")
    assert "the last 1 of 12" in found.words
    assert "; or padding is read as data" in found.words  # which is no number either


def test_a_row_with_one_number_that_is_none_was_written(clean_ue8m0):
    output = clean_ue8m0.tensor(Stage.GEMM2, RANK, "output").clone()
    output[clean_ue8m0.route(RANK).row, 5] = torch.nan
    found = diagnosed(clean_ue8m0, Stage.GEMM2, RANK, {"output": output})
    assert named(found) == (None, "none")


def gemm1_of(run, expert):
    """Rows of the rank's first expert by another one's weights."""
    from reports.verdict.ledger import Ledger
    from reports.verdict.stage_weights import JudgedWeights

    weights = JudgedWeights(run.resolved.judged, run.traces, Ledger())
    return weights.expert(RANK, expert)[0]


def test_a_row_by_the_other_experts_weights_names_it(clean_ue8m0):
    run, route = clean_ue8m0, clean_ue8m0.route(RANK)
    first, last = run.resolved.judged.local_experts(RANK)
    slot = 1 if route.expert == first else 0
    rows = run.tensor(Stage.PRE_PERMUTE, RANK, "rows.hidden_states")
    scale = run.tensor(Stage.PRE_PERMUTE, RANK, "rows.hidden_states_scale")
    from reports.verdict.decode import dequantized

    at = torch.tensor([route.row])
    lhs = dequantized(take_rows(rows, at), take_rows(scale, at), 128)
    gate_up = run.tensor(Stage.GEMM1, RANK, "gate_up").clone()
    gate_up[route.row] = (lhs @ gemm1_of(run, slot).T).to(torch.bfloat16)[0]
    found = diagnosed(run, Stage.GEMM1, RANK, {"gate_up": gate_up})
    other = last if slot else first
    assert named(found) == ("wrong_expert", "high")
    assert f"token {route.token} slot {route.slot} expert {other}'s" in found.words


@pytest.mark.parametrize("turns", [False, True])
def test_gate_and_up_columns_in_another_order_are_named(clean_ue8m0, turns):
    gate_up = clean_ue8m0.tensor(Stage.GEMM1, RANK, "gate_up")
    width = gate_up.shape[1]
    order = torch.arange(width).roll(width // 2)
    if turns:
        order = torch.arange(width).view(2, -1).T.flatten()
    found = diagnosed(clean_ue8m0, Stage.GEMM1, RANK, {"gate_up": gate_up[:, order]})
    assert named(found) == ("gate_up_swapped", "high")


def test_gate_up_columns_reversed_are_not_explained(clean_ue8m0):
    gate_up = clean_ue8m0.tensor(Stage.GEMM1, RANK, "gate_up").flip(1)
    found = diagnosed(clean_ue8m0, Stage.GEMM1, RANK, {"gate_up": gate_up})
    assert named(found) == (None, "none")


def partial_of(run, coefficients):
    """Each received row's sum with so much of the route in each slot."""
    restore = run.traces[RANK][Stage.PRE_PERMUTE]
    index = restore["restore.output_index"]
    outputs = run.tensor(Stage.GEMM2, RANK, "output").double()
    weights = restore["restore.topk_weights"].double()
    rows = outputs[index.clamp(min=0)].nan_to_num() * (index >= 0)[..., None]
    times = coefficients(weights) * weights
    return (times[..., None] * rows).sum(1).to(torch.bfloat16)


def of_partial(run, coefficients):
    partial = partial_of(run, coefficients)
    return diagnosed(run, Stage.POST_PERMUTE, RANK, {"partial": partial})


def inverse(weights):
    return torch.where(weights == 0, 0.0, 1 / weights)


@pytest.mark.parametrize(
    ("words", "coefficients"),
    [
        ("top-k weights applied twice", lambda w: w),
        ("top-k weights not applied", inverse),
        ("every route weighted as slot 0", lambda w: w[:, :1] * inverse(w)),
        ("every route weighted as the next slot", lambda w: w.roll(-1, 1) * inverse(w)),
    ],
)
def test_top_k_weights_by_another_law_are_named(clean_ue8m0, words, coefficients):
    found = of_partial(clean_ue8m0, coefficients)
    assert found.mistake == "topk_weights"
    assert found.words.startswith(words)


def test_a_route_that_is_not_added_is_named_by_its_slot(clean_ue8m0):
    restore = clean_ue8m0.traces[RANK][Stage.PRE_PERMUTE]["restore.output_index"]
    row = int(((restore >= 0).sum(1) > 1).nonzero()[0])
    slot = int((restore[row] >= 0).nonzero()[0])

    def without(weights):
        kept = torch.ones_like(weights)
        kept[row, slot] = 0.0
        return kept

    found = of_partial(clean_ue8m0, without)
    token = clean_ue8m0.received_token(RANK, row)
    assert named(found) == ("routes_lost", "low")  # one number, which a wrong weight might hit
    assert f"slot {slot} missing of token {token}" in found.words


def test_a_slot_that_is_added_in_no_row_is_sure(clean_ue8m0):
    def without(weights):
        kept = torch.ones_like(weights)
        kept[torch.arange(len(kept)), weights.argmax(1)] = 0.0
        return kept

    assert named(of_partial(clean_ue8m0, without)) == ("routes_lost", "high")


def test_a_law_of_weights_that_a_right_row_contradicts_is_no_law(clean_ue8m0):
    def twice_but_once(weights):
        twice = weights.clone()
        twice[0] = 1.0
        return twice

    found = of_partial(clean_ue8m0, twice_but_once)
    assert named(found) == (None, "none")


def test_routes_at_nine_tenths_are_not_explained(clean_ue8m0):
    assert named(of_partial(clean_ue8m0, lambda w: torch.full_like(w, 0.9))) == (None, "none")

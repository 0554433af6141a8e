"""Routes by another rule: weights, choices, ids and counts of received rows."""

import pytest
import torch

from moe.formats import Stage
from tests.verdict.diagnoses import diagnosed, named

RANK = 2


def weights_of(run, change):
    weights = change(run.tensor(Stage.ROUTE, RANK, "topk_weights"))
    return diagnosed(run, Stage.ROUTE, RANK, {"topk_weights": weights})


@pytest.mark.parametrize(
    ("mistake", "words", "change"),
    [
        ("topk_weights", "applied twice", lambda w: w * w),
        ("topk_weights", "not applied", torch.ones_like),
        ("topk_weights", "weight of slot 0", lambda w: w[:, :1].expand_as(w).contiguous()),
        ("topk_weights", "weight of the next one", lambda w: w.roll(-1, 1)),
        ("scaling_factor", "applied to the weights", lambda w: w * 1.5),
        ("scaling_factor", "divided out of the weights", lambda w: w / 1.5),
    ],
)
def test_weights_by_another_law_are_named(clean_ue8m0, mistake, words, change):
    found = weights_of(clean_ue8m0, change)
    assert named(found) == (mistake, "high")
    assert words in found.words


def test_weights_that_are_two_percent_too_large_are_not_explained(clean_ue8m0):
    assert named(weights_of(clean_ue8m0, lambda w: w * 1.02)) == (None, "none")


def chosen(run, change):
    ids = run.tensor(Stage.ROUTE, RANK, "topk_ids")
    return diagnosed(run, Stage.ROUTE, RANK, {"topk_ids": change(ids)})


def test_rows_whose_routes_are_all_dropped_are_masked(clean_ue8m0):
    def masked(ids):
        ids = ids.clone()
        ids[5:] = -1
        return ids

    found = chosen(clean_ue8m0, masked)
    assert named(found) == ("routes_lost", "high")
    assert found.words == "rows masked that hold tokens: 4 rows, 5..8 of the rank"


def test_masked_rows_that_do_not_follow_one_another_are_told_apart(clean_ue8m0):
    def masked(ids):
        ids = ids.clone()
        ids[[1, 4, 5, 8]] = -1
        ids[2, 0] = ids[2, 1]  # wrong as well, and not masked
        return ids

    found = chosen(clean_ue8m0, masked)
    assert named(found) == ("routes_lost", "low")
    assert found.words.startswith("rows masked that hold tokens: 4 rows, 1, 4..5, 8 of the rank")


def test_experts_by_another_rule_that_a_right_row_contradicts_are_no_rule(clean_ue8m0):
    logits = clean_ue8m0.tensor(Stage.ROUTE, RANK, "logits").double()
    bias = clean_ue8m0.tensor(Stage.WEIGHTS, RANK, "correction_bias").double()
    due = clean_ue8m0.tensor(Stage.ROUTE, RANK, "topk_ids")
    scores = torch.nn.functional.softplus(logits).sqrt()
    unbiased = scores.sort(dim=1, descending=True, stable=True).indices[:, : due.shape[1]].int()
    moved = ((scores + bias).argsort(1, descending=True)[:, : due.shape[1]] == due).all()
    assert moved, "the golden's rule is this one"
    assert named(chosen(clean_ue8m0, lambda _: unbiased)) == ("expert_choice", "high")
    wrong = (unbiased != due).any(1).nonzero()[:, 0]
    one_right = unbiased.clone()
    one_right[wrong[0]] = due[wrong[0]]
    assert named(chosen(clean_ue8m0, lambda _: one_right)) == (None, "none")


def test_experts_chosen_at_random_have_no_rule(clean_ue8m0):
    assert named(chosen(clean_ue8m0, lambda ids: ids.flip(1))) == (None, "none")


def received(run, change):
    ids = change(run.tensor(Stage.DISPATCH, RANK, "topk_ids"))
    return diagnosed(run, Stage.DISPATCH, RANK, {"topk_ids": ids})


@pytest.mark.parametrize(
    ("mistake", "words", "change"),
    [
        ("ids", "26 are 4 too large", lambda ids: torch.where(ids >= 0, ids + 4, ids)),
        ("ids", "absent routes marked 2", lambda ids: torch.where(ids < 0, 2, ids)),
    ],
)
def test_ids_of_another_space_are_named(clean_ue8m0, mistake, words, change):
    found = received(clean_ue8m0, change)
    assert named(found) == (mistake, "high")
    assert words in found.words


def test_lost_ids_are_as_common_as_absent_ones_and_therefore_perhaps(clean_ue8m0):
    found = received(clean_ue8m0, lambda ids: torch.full_like(ids, -1))
    assert named(found) == ("routes_lost", "low")
    assert "26 ids of 17 rows are -1" in found.words


def test_ids_that_are_exchanged_are_not_explained(clean_ue8m0):
    found = received(clean_ue8m0, lambda ids: torch.where(ids >= 0, 1 - ids, ids))
    assert named(found) == (None, "none")


@pytest.mark.parametrize(
    ("change", "words"), [(1, "counts 1 rows too many"), (-3, "counts 3 rows too few")]
)
def test_counts_say_by_how_much_they_are_off(clean_ue8m0, change, words):
    name = "num_recv_tokens_per_expert"
    counts = clean_ue8m0.tensor(Stage.DISPATCH, RANK, name).clone()
    counts[0] += change
    found = diagnosed(clean_ue8m0, Stage.DISPATCH, RANK, {name: counts})
    assert named(found) == ("counts", "high")
    assert words in found.words


def test_a_row_that_meets_another_expert_names_both(clean_ue8m0):
    name, route = "rows.m_indices", clean_ue8m0.route(RANK)
    m_indices = clean_ue8m0.tensor(Stage.PRE_PERMUTE, RANK, name).clone()
    m_indices[route.row] = 1 - m_indices[route.row]
    traces = clean_ue8m0.changed(Stage.PRE_PERMUTE, RANK, {name: m_indices})
    ledger = clean_ue8m0.judged(traces)
    found = clean_ue8m0.judge.diagnose(clean_ue8m0.batch, traces, ledger)
    (met,) = [said for one, said in found.items() if one.tensor == "rows"]
    experts = clean_ue8m0.resolved.judged.local_experts(RANK)
    other = next(expert for expert in experts if expert != route.expert)
    assert named(met) == ("wrong_expert", "high")
    assert f"slot {route.slot} meets expert {other}, due {route.expert}" in met.words


def test_a_forward_without_a_deviation_is_not_diagnosed(clean):
    assert clean.judge.diagnose(clean.batch, clean.traces, clean.judged()) == {}

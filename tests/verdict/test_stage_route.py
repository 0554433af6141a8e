"""The router: logits and weights are judged by their own roundings."""

import pytest
import torch

from moe.formats import Stage
from tests.verdict.clean_runs import run_clean

U32 = 2.0**-24


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


def test_a_vocabulary_id_that_does_not_exist_is_an_error_of_the_glue(clean_layout):
    run = clean_layout("hash_layer")
    ids = run.tensor(Stage.GLUE_IN, 1, "input_ids").clone()
    ids[0] = 10**6
    first = run.judged(run.changed(Stage.GLUE_IN, 1, {"input_ids": ids})).deviations[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.GLUE_IN, 1, "input_ids")
    assert first.token == run.layer_token(1, 0)


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


@pytest.fixture(scope="module")
def with_padding():
    """Two groups of two ranks before an all-to-all: 5 and 3 tokens in 6 and 4 rows."""
    return run_clean(
        "parallel={world_size: 4, attention: {dp: 2, tp: 2}, moe: {ep: 4}}", "batch.tokens=[5, 3]"
    )


def test_padding_before_an_all_to_all_is_judged_without_a_deviation(with_padding):
    assert with_padding.judged().deviations == []


def test_a_padding_row_that_was_routed_is_found(with_padding):
    """The last row of ranks 1 and 3 is padding: rank 1 holds tokens 3 and 4, then none."""
    ids = with_padding.tensor(Stage.ROUTE, 1, "topk_ids").clone()
    assert ids[2].tolist() == [-1] * 6
    ids[2, 0] = 3
    deviations = with_padding.judged(
        with_padding.changed(Stage.ROUTE, 1, {"topk_ids": ids})
    ).deviations
    moves = [one for one in deviations if one.check == "contract: moves"]
    assert (moves[0].stage, moves[0].rank, moves[0].tensor) == (Stage.ROUTE, 1, "topk_ids")
    assert (moves[0].token, moves[0].slot, moves[0].got) == (None, 0, 3.0)


def test_a_weight_on_an_unrouted_padding_row_is_found(with_padding):
    weights = with_padding.tensor(Stage.ROUTE, 1, "topk_weights").clone()
    weights[-1] = 0.9
    first = with_padding.first(Stage.ROUTE, 1, "topk_weights", weights)
    assert (first.rank, first.tensor, first.want) == (1, "topk_weights", 0.0)


def test_a_padding_row_that_is_gathered_is_routed_like_a_token(clean_layout):
    run = clean_layout("dp_tp_all_reduce")  # row 5 is padding
    ids = run.tensor(Stage.ROUTE, 2, "topk_ids").clone()
    ids[5] = -1
    first = run.judged(run.changed(Stage.ROUTE, 2, {"topk_ids": ids})).deviations[0]
    assert (first.stage, first.rank, first.token) == (Stage.ROUTE, 2, None)


GROUPS = (
    "model.overrides.n_group=4",
    "model.overrides.topk_group=2",
    "model.overrides.num_experts_per_tok=3",
)


@pytest.fixture(scope="module")
def grouped():
    """Routes of three experts out of two of four groups, two experts a group."""
    return run_clean(*GROUPS)


def test_grouped_routing_is_judged_without_a_deviation(grouped):
    assert grouped.judged().deviations == []


def test_an_expert_of_a_group_that_was_left_out_is_found(grouped):
    ids = grouped.tensor(Stage.ROUTE, 0, "topk_ids").clone()
    left_out = next(e for e in range(8) if e // 2 not in {int(i) // 2 for i in ids[1]})
    ids[1, 2] = left_out
    found = grouped.judged(grouped.changed(Stage.ROUTE, 0, {"topk_ids": ids})).deviations
    first = next(one for one in found if one.check == "router rule")
    assert (first.stage, first.rank, first.token) == (Stage.ROUTE, 0, 1)


PINNED = {
    "ids": ("topk_ids", "batch.routing={kind: balanced, weights: router}"),
    "weights": ("topk_weights", "batch.routing={kind: router, weights: pinned}"),
}


@pytest.mark.parametrize("case", PINNED)
def test_a_pinned_route_is_compared_bit_by_bit(case):
    name, setting = PINNED[case]
    run = run_clean(setting)
    assert run.judged().deviations == []
    spoiled = run.tensor(Stage.ROUTE, 1, name).clone()
    bits = spoiled.view(torch.int32)
    bits[2, 0] ^= 1
    found = run.judged(run.changed(Stage.ROUTE, 1, {name: spoiled})).deviations
    first = next(one for one in found if one.check == "contract: moves")
    assert (first.stage, first.rank, first.tensor) == (Stage.ROUTE, 1, name)
    assert first.token == run.own_token(1, 2)

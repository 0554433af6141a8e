"""Made routes and made logits: what each kind promises."""

import pytest
import torch

from moe.formats import ScoringFunc
from moe.grouped_gemm import matmul_nt
from moe.random_tensors import normal, seeded
from moe.routing import RoutingRule, select_experts
from scenarios.errors import InputError
from scenarios.routings import (
    MADE_LOGITS,
    MADE_ROUTES,
    made_bias,
    made_gate,
    made_hidden_states,
    made_routes,
)

T, K, E, L = 200, 4, 32, 8
EVERY_KIND = pytest.mark.parametrize("kind", MADE_ROUTES)


def routes(kind: str, **changes) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = {"seed": 7, "tokens": T, "top_k": K, "num_experts": E, "num_local_experts": L}
    return made_routes(kind, **{**sizes, **changes})


def loads(ids: torch.Tensor) -> list[int]:
    return torch.bincount(ids[ids >= 0], minlength=E).tolist()


@EVERY_KIND
def test_a_tokens_experts_are_distinct_and_exist(kind):
    ids, _ = routes(kind)
    assert (ids < E).all()
    for row in ids.tolist():
        present = [expert for expert in row if expert >= 0]
        assert len(set(present)) == len(present)


@EVERY_KIND
@pytest.mark.parametrize("tokens", [0, 1, 5, 199])
def test_a_tokens_routes_do_not_depend_on_how_many_follow(kind, tokens):
    few, many = routes(kind, tokens=tokens), routes(kind)
    assert torch.equal(few[0], many[0][:tokens])
    assert torch.equal(few[1], many[1][:tokens])


@EVERY_KIND
def test_another_seed_makes_other_routes(kind):
    assert not torch.equal(routes(kind)[0], routes(kind, seed=8)[0])


@EVERY_KIND
def test_ids_are_int32_and_weights_positive_fp32_shares(kind):
    ids, weights = routes(kind)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert (weights > 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(T), rtol=1e-6, atol=0)


def test_balanced_loads_differ_by_one_at_most():
    load = loads(routes("balanced", tokens=203)[0])
    assert max(load) - min(load) == 1  # 812 routes over 32 experts


def test_zipf_loads_fall_off_by_rank():
    load = sorted(loads(routes("zipf", tokens=4000, top_k=1)[0]), reverse=True)
    share = [1 / rank for rank in range(1, E + 1)]
    expected = [4000 * one / sum(share) for one in share]
    assert load[:4] == pytest.approx(expected[:4], rel=0.15)


@pytest.mark.parametrize("top_k", [1, 4])
def test_nine_tokens_of_ten_go_to_the_hot_expert(top_k):
    load = loads(routes("hot_expert", top_k=top_k)[0])
    assert max(load) == 180
    assert sorted(load)[-2] < 60


def test_the_hot_expert_stands_in_every_slot():
    ids, _ = routes("hot_expert")
    hot = loads(ids).index(180)
    assert (ids == hot).any(dim=0).all()


def test_one_rank_uses_all_of_one_block_and_nothing_else():
    used = routes("one_rank")[0].unique().tolist()
    assert used == list(range(used[0], used[0] + L))
    assert used[0] % L == 0


def test_every_fourth_token_has_lost_its_first_slot():
    assert (routes("dropped")[0][0::4, 0] == -1).all()


def test_every_fourth_token_has_lost_all_its_slots():
    assert (routes("dropped")[0][2::4] == -1).all()


def test_the_other_tokens_have_lost_the_dropped_expert_at_most():
    assert (routes("dropped")[0][1::2] < 0).sum(dim=1).max() == 1


def test_a_whole_expert_is_dropped():
    load = loads(routes("dropped")[0])
    assert load.count(0) == 1


def test_dropped_slots_keep_a_weight():
    ids, weights = routes("dropped")
    assert (weights[ids < 0] > 0).all()


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("one_rank", {"top_k": 9}, "9 distinct experts of one rank, and there are 8"),
        ("hot_expert", {"top_k": 32}, "all experts but the hot one, and there are 31"),
        ("balanced", {"top_k": 33}, "33 distinct experts of all experts, and there are 32"),
    ],
)
def test_too_few_experts_are_refused(kind, changes, message):
    with pytest.raises(InputError, match=message):
        routes(kind, **changes)


@pytest.mark.parametrize("kind", ["router", *MADE_LOGITS])
def test_a_kind_without_made_routes_is_refused(kind):
    with pytest.raises(ValueError, match=rf"'{kind}' is not one of balanced, zipf"):
        routes(kind)


def made_layer(kind: str, hidden_size: int = 96) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, E] and correction bias [E] as a layer of this kind has them."""
    x = made_hidden_states(kind, normal(seeded(1, "x"), T, hidden_size))
    gate = normal(seeded(2, "gate"), E, hidden_size, std=hidden_size**-0.5)
    bias = made_bias(kind, torch.randn(E, generator=seeded(3, "bias")))
    return matmul_nt(x.float(), made_gate(kind, gate).float()), bias


@pytest.mark.parametrize("hidden_size", [96, 512, 1000])
def test_tied_experts_have_bitwise_equal_logits(hidden_size):
    logits, _ = made_layer("ties", hidden_size)
    first = [0, 0, 2, 2, 2, 5, 5, 7, 7, 7]
    assert torch.equal(logits[:, :10], logits[:, first])


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8])
def test_ties_fall_across_the_cut(top_k, biased):
    logits, bias = made_layer("ties")
    every = RoutingRule(top_k=E, scoring_func=ScoringFunc.SIGMOID, renormalize=False)
    ids = select_experts(logits, bias if biased else None, every).topk_ids
    ranked = logits.sigmoid() + (bias if biased else 0)
    at_the_cut = ranked.gather(1, ids[:, top_k - 1 : top_k + 1].long())
    assert (at_the_cut[:, 0] == at_the_cut[:, 1]).any()


def test_all_negative_logits_are_far_below_zero():
    assert made_layer("all_negative")[0].max() < -3.0


def test_all_negative_logits_still_differ():
    assert made_layer("all_negative")[0].std(dim=1).min() > 0.3


def test_all_negative_ranks_are_negative():
    logits, bias = made_layer("all_negative")
    assert (logits.sigmoid() + bias).max() < 0


def test_the_largest_bias_is_lowered_to_minus_one():
    assert made_bias("all_negative", torch.tensor([0.5, 2.0, -1.0])).tolist() == [-2.5, -1.0, -4.0]


@pytest.mark.parametrize("kind", ["ties", "all_negative"])
def test_a_gate_keeps_its_type_and_its_caller_its_gate(kind):
    gate = normal(seeded(2, "gate"), E, 8)
    before = gate.clone()
    assert made_gate(kind, gate).dtype == torch.bfloat16
    assert torch.equal(gate, before)


@pytest.mark.parametrize("kind", ["router", *MADE_ROUTES])
def test_other_kinds_leave_router_and_tokens_alone(kind):
    gate, bias, x = torch.ones(E, 4), torch.ones(E), torch.zeros(3, 4)
    assert made_gate(kind, gate) is gate
    assert made_bias(kind, bias) is bias
    assert made_hidden_states(kind, x) is x


@pytest.mark.parametrize("kind", MADE_LOGITS)
def test_a_layer_without_a_bias_gets_none(kind):
    assert made_bias(kind, None) is None

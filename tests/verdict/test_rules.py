"""Step functions: a code or a chosen expert may differ only next to an edge."""

from dataclasses import replace

import pytest
import torch

from moe.formats import ScaleFormat, ScoringFunc, Stage
from moe.golden import GoldenRouting, quantize_groups, select_experts
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from reports.verdict.rules import check_quantiser, check_routes, groups_the_run_may_use

NOISE = 3 * 2.0**-24


def quantiser_deviations(source, values, scale, noise=NOISE, scale_format=ScaleFormat.FP32):
    ledger = Ledger()
    check_quantiser(
        ledger,
        Stage.ACTIVATION,
        "hidden_states",
        Rows.of_rank(0, source.shape[0]),
        values=values.to(torch.float8_e4m3fn),
        scale=scale,
        want=quantize_groups(source, scale_format),
        noise=noise,
    )
    return ledger.deviations


def row_with_a_value_at(scaled):
    """[1, 128] float64 whose amax is 448, so scale 1, with one more value."""
    row = torch.zeros(1, 128, dtype=torch.float64)
    row[0, 0], row[0, 1] = 448.0, scaled
    return row


ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("scaled", "code", "legal"),
    [
        (17.0, 16.0, True),
        (17.0, 18.0, True),
        (17.0 * (1 - 2.0**-23), 18.0, True),
        (17.0 * (1 - 2.0**-23), 16.0, True),
        (17.0 * (1 - 2.0**-20), 16.0, True),
        (17.0 * (1 - 2.0**-20), 18.0, False),
        (17.0 * (1 + 2.0**-23), 16.0, True),
        (17.0 * (1 + 2.0**-20), 16.0, False),
        (16.9, 18.0, False),
        (16.0, 18.0, False),
        (16.0, 16.0, True),
        (-17.0, -18.0, True),
        (-16.0, -18.0, False),
        (16.0, -16.0, False),
        (0.0, 2.0**-9, False),
        (2.0**-10, 0.0, True),
        (2.0**-10, 2.0**-9, True),
        (16.0, float("nan"), False),
    ],
)
def test_a_code_may_differ_only_next_to_a_rounding_boundary(scaled, code, legal):
    values = row_with_a_value_at(code)
    found = quantiser_deviations(row_with_a_value_at(scaled), values, ONE)
    assert [one.tensor for one in found] == ([] if legal else ["hidden_states"])


def test_without_noise_a_tie_has_one_answer():
    found = quantiser_deviations(row_with_a_value_at(17.0), row_with_a_value_at(18.0), ONE, noise=0)
    assert [(one.got, one.want) for one in found] == [(18.0, 16.0)]


@pytest.mark.parametrize(
    ("scale", "legal"), [(1.0, True), (1 + 2.0**-23, True), (1 + 2.0**-22, False), (-1.0, False)]
)
def test_an_fp32_scale_may_be_one_last_place_off(scale, legal):
    row = row_with_a_value_at(16.0)
    found = quantiser_deviations(row, row, torch.tensor([[scale]], dtype=torch.float32))
    assert [one.tensor for one in found] == ([] if legal else ["hidden_states_scale"])


@pytest.mark.parametrize(("exponent", "legal"), [(127, True), (126, False), (128, False)])
def test_a_ue8m0_scale_has_to_be_equal(exponent, legal):
    row = row_with_a_value_at(16.0)
    packed = torch.tensor([[exponent]], dtype=torch.int32)
    found = quantiser_deviations(row, row, packed, noise=0, scale_format=ScaleFormat.UE8M0)
    assert [one.tensor for one in found] == ([] if legal else ["hidden_states_scale"])


def route_deviations(logits, ids, bias=None, noise=2.0**-20, top_k=2):
    logits = torch.tensor([logits], dtype=torch.float64)
    bias = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    rule = GoldenRouting(top_k=top_k, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=True)
    want = select_experts(logits, bias, rule)
    ledger = Ledger()
    legal = check_routes(
        ledger, Rows.of_rank(0, 1), ids=torch.tensor([ids]), want=want, noise=noise, bias=bias
    )
    assert legal.tolist() == [not ledger.deviations]
    return ledger.deviations


CLEAR = [0.0, 3.0, 1.0, 2.0]
NEAR = [0.0, 1.0, 1.0 + 2.0**-22, 0.5]
TIED = [0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("logits", "ids", "legal"),
    [
        (CLEAR, [1, 3], True),
        (CLEAR, [3, 1], False),
        (CLEAR, [1, 2], False),
        (CLEAR, [1, 1], False),
        (CLEAR, [1, -1], False),
        (CLEAR, [1, 4], False),
        (CLEAR, [-2, 3], False),
        (NEAR, [2, 1], True),
        (NEAR, [1, 2], True),
        (NEAR, [1, 1], False),
        (NEAR, [2, 3], False),
        (TIED, [1, 2], True),
        (TIED, [2, 1], False),
        (TIED, [1, 3], False),
        (TIED, [2, 3], False),
        ([float("nan"), 1.0, 2.0, 0.0], [2, 1], True),
        ([float("nan"), 1.0, 2.0, 0.0], [0, 2], False),
        ([float("nan")] * 4, [0, 1], True),
    ],
)
def test_another_expert_is_legal_only_within_the_routers_noise(logits, ids, legal):
    assert (route_deviations(logits, ids) == []) is legal


def test_a_swap_across_the_cut_is_legal_only_within_the_noise():
    near_the_cut = [5.0, 1.0, 1.0 + 2.0**-22, 0.0]
    assert route_deviations(near_the_cut, [0, 1]) == []
    assert route_deviations(near_the_cut, [0, 1], noise=2.0**-26) != []


def test_the_noise_grows_with_the_bias_that_is_added():
    """score(0) + bias differ by 2^-14: noise for biases of 100, not without them."""
    bias = [100.0, 100.0 + 2.0**-14, 0.0, 0.0]
    logits = [0.0, 0.0, -9.0, -9.0]
    assert route_deviations(logits, [0, 1], bias=bias) == []
    small = [value - 100.0 if value else 0.0 for value in bias]
    assert route_deviations(logits, [0, 1], bias=small) != []


def test_only_one_expert_a_token_needs_no_distinct_ids():
    assert route_deviations(CLEAR, [1], top_k=1) == []


GROUPED = GoldenRouting(
    top_k=2, scoring_func=ScoringFunc.SIGMOID, renormalize=True, n_group=3, topk_group=1
)


def groups_used(logits, ids, noise=2.0**-20, rule=GROUPED):
    """Groups the run may use, from logits of three groups of two experts."""
    logits = torch.tensor([logits], dtype=torch.float64)
    bias = torch.zeros(logits.shape[1], dtype=torch.float64)
    want = select_experts(logits, bias, rule)
    noises = torch.full_like(logits, noise)
    allowed = groups_the_run_may_use(torch.tensor([ids]), want, rule, noises, bias)
    return allowed[0].tolist()


CLOSE = 1.0 - 2.0**-22
LEADING = [1.0, 1.0, 1.0, CLOSE, 0.9, 0.9]
"""Groups 0 and 1 score alike up to noise, group 2 is clearly behind."""


@pytest.mark.parametrize(
    ("ids", "groups"),
    [
        ([0, 1], [True, False, False]),
        ([2, 3], [False, True, False]),
        ([4, 5], [True, False, False]),
        ([1, 2], [True, False, False]),
        ([2, 4], [True, False, False]),
        ([-1, -1], [True, False, False]),
    ],
    ids=["the golden's", "as good", "worse", "two of one", "as good and worse", "none"],
)
def test_a_group_near_the_boundary_may_stand_in_for_the_goldens(ids, groups):
    assert groups_used(LEADING, ids) == groups


def test_a_group_outside_the_noise_may_not_stand_in():
    assert groups_used(LEADING, [2, 3], noise=2.0**-28) == [True, False, False]


def test_the_best_groups_fill_up_what_the_run_leaves_open():
    rule = replace(GROUPED, topk_group=2)
    assert groups_used([1.0, 1.0, 0.9, CLOSE * 0.9, 0.9, 0.9], [2, 3], rule=rule) == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("ids", "legal"), [([2, 3], True), ([4, 5], False), ([0, 2], False)])
def test_experts_of_a_stand_in_group_are_legal_routes(ids, legal):
    """Judged in the groups that the run may use, as the route stage does."""
    logits = torch.tensor([LEADING], dtype=torch.float64)
    bias, noise = torch.zeros(6, dtype=torch.float64), torch.full_like(logits, 2.0**-20)
    free = select_experts(logits, bias, GROUPED)
    allowed = groups_the_run_may_use(torch.tensor([ids]), free, GROUPED, noise, bias)
    want = select_experts(logits, bias, GROUPED, groups_in_use=allowed)
    found = check_routes(
        Ledger(), Rows.of_rank(0, 1), ids=torch.tensor([ids]), want=want, noise=noise, bias=bias
    )
    assert found.tolist() == [legal]

"""Faults of the gated activation: formulas that are not the model's, in the rows they change."""

from dataclasses import replace

import pytest
import torch

from moe.faults.activations import (
    activation_plain_silu,
    clamp_after_product,
    routed_no_clamp,
    shared_no_clamp,
    situ_tan,
    up_without_one,
)
from moe.faults.bits import same_values
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from moe.stages import ActivationOutput, Gemm1Output, SharedExpertOutput, TailOutput
from moe.weights import ExpertMatrix, ExpertWeights
from tests.unit.faults.values import context, in_slabs, layer_weights, permuted

BF16, NAN = torch.bfloat16, float("nan")
SILU = {"limit": 10.0, "alpha": 0.0}
OAI = {"limit": 7.0, "alpha": 1.702}
SITU = {"alpha": 4.0, "linear_limit": 25.0}

FORMULAS = pytest.mark.parametrize(
    ("fault", "params", "gate_up", "due", "wrong"),
    [
        (routed_no_clamp, SILU, (12.0, 3.0), 30.0, 36.0),
        (routed_no_clamp, SILU, (2.0, -11.0), -17.625, -19.375),
        (routed_no_clamp, OAI, (8.0, 3.0), 28.0, 32.0),
        (clamp_after_product, SILU, (5.0, 4.0), 19.875, 10.0),
        (clamp_after_product, SILU, (5.0, -4.0), -19.875, -10.0),
        (activation_plain_silu, {}, (12.0, 3.0), 30.0, 36.0),
        (activation_plain_silu, {}, (2.0, 3.0), 7.75, 5.28125),
        (up_without_one, OAI, (2.0, 3.0), 7.75, 5.8125),
        (situ_tan, SITU, (4.0, 25.0), 57.0, 238.0),
    ],
    ids=[
        "gate unclamped",
        "up unclamped",
        "oai unclamped",
        "clamped after",
        "clamped after, negative",
        "silu without clamp",
        "silu for oai",
        "up without one",
        "tan",
    ],
)


def behind(gate_up, rows=None, **params):
    """A context behind GEMM1: rows 0 and 2 of four are live unless ``rows`` say otherwise."""
    seen = {
        Stage.PRE_PERMUTE: rows or permuted(),
        Stage.GEMM1: Gemm1Output(gate_up=torch.tensor(gate_up, dtype=BF16)),
    }
    return context(seen, **params)


def stored(*rows, dtype=BF16):
    activation = torch.tensor(rows, dtype=dtype)
    return ActivationOutput(
        activation=activation, hidden_states=activation, hidden_states_scale=None
    )


@FORMULAS
def test_a_row_gets_the_product_of_the_wrong_formula(fault, params, gate_up, due, wrong):
    seen = behind([gate_up, (NAN, NAN), (0.0, 0.0), (NAN, NAN)], **params)
    middle = fault(stored([due], [NAN], [0.0], [NAN]), seen)
    assert middle.activation[[0, 2], 0].tolist() == [wrong, 0.0]
    assert middle.hidden_states is middle.activation


@FORMULAS
def test_rows_of_padding_keep_their_poison(fault, params, gate_up, due, wrong):
    seen = behind([gate_up, (NAN, NAN), gate_up, (NAN, NAN)], **params)
    middle = fault(stored([due], [NAN], [due], [NAN]), seen)
    assert middle.activation[:, 0].isnan().tolist() == [False, True, False, True]


def test_rows_of_slabs_are_found_in_their_places():
    seen = behind([[[12.0, 3.0], [NAN, NAN]], [[2.0, 3.0], [NAN, NAN]]], in_slabs(), **SILU)
    before = stored([[30.0], [NAN]], [[5.28125], [NAN]])
    middle = routed_no_clamp(before, seen)
    assert middle.activation[:, 0, 0].tolist() == [36.0, 5.28125]


@pytest.mark.parametrize(
    ("fault", "params"),
    [
        (routed_no_clamp, OAI),
        (routed_no_clamp, {"limit": 20.0, "alpha": 0.0}),
        (clamp_after_product, OAI),
        (up_without_one, OAI),
        (situ_tan, SITU),
    ],
    ids=["no clamp: oai", "no clamp: another limit", "clamped after", "up", "tan"],
)
def test_experts_of_another_model_are_left_alone(fault, params):
    before = stored([30.0], [NAN], [0.0], [NAN])
    seen = behind([(12.0, 3.0), (NAN, NAN), (0.0, 0.0), (NAN, NAN)], **params)
    assert fault(before, seen) is before


@pytest.mark.parametrize("fault", [routed_no_clamp, activation_plain_silu])
def test_gate_and_up_inside_the_limit_need_no_clamp(fault):
    before = stored([5.28125], [NAN], [0.0], [NAN])
    seen = behind([(2.0, 3.0), (NAN, NAN), (0.0, 0.0), (NAN, NAN)], **SILU)
    assert same_values(fault(before, seen), before)


def test_a_plain_silu_stored_twice_is_a_plain_silu():
    """silu(2) is 1.7616, stored as 1.7578; times 3 that is 5.2734, stored as 5.2813."""
    before = stored([5.28125], [NAN], [0.0], [NAN])
    seen = behind([(2.0, 3.0), (NAN, NAN), (0.0, 0.0), (NAN, NAN)])
    assert activation_plain_silu(before, seen) is before


WIDE = [[12.0] * 128 + [8.0] * 128]  # 80 with a clamp at 10, 96 without


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["stored", "fused"])
@pytest.mark.parametrize("word", [0x7D, 0x7D7D7D7D], ids=["groups of 128", "groups of 32"])
def test_packed_rows_are_quantised_again_in_their_groups(dtype, word):
    before = ActivationOutput(
        activation=torch.full((1, 128), 80.0, dtype=dtype),
        hidden_states=torch.full((1, 128), 320.0).to(torch.float8_e4m3fn),
        hidden_states_scale=mn_major(torch.tensor([[word]], dtype=torch.int32)),
    )
    middle = routed_no_clamp(before, behind(WIDE, permuted((0,), (0,)), **SILU))
    assert middle.hidden_states.to(torch.float32).unique().tolist() == [384.0]
    assert middle.hidden_states_scale.tolist() == [[word]]


@pytest.mark.parametrize("groups", [1, 4], ids=["groups of 128", "groups of 32"])
def test_fp32_scales_follow_the_largest_product(groups):
    before = ActivationOutput(
        activation=torch.full((1, 128), 80.0, dtype=BF16),
        hidden_states=torch.full((1, 128), 448.0).to(torch.float8_e4m3fn),
        hidden_states_scale=mn_major(torch.full((1, groups), 80 / 448)),
    )
    middle = routed_no_clamp(before, behind(WIDE, permuted((0,), (0,)), **SILU))
    assert middle.hidden_states_scale.tolist() == [pytest.approx([96 / 448] * groups)]


def shared_path(gate_up, activation, output, codes=None, scale=None):
    rows = torch.tensor([activation], dtype=BF16)
    return SharedExpertOutput(
        input=rows,
        input_scale=None,
        gate_up=torch.tensor([gate_up], dtype=BF16),
        activation=rows,
        hidden_states=rows if codes is None else codes,
        hidden_states_scale=scale,
        output=torch.tensor([[output]], dtype=BF16),
    )


def tail(shared, output, **sums):
    return TailOutput(shared=shared, output=torch.tensor([[output]], dtype=BF16), **sums)


def with_shared_w2(matrix, **params):
    shared = ExpertWeights(w13=matrix, w2=matrix)
    return context({Stage.WEIGHTS: replace(layer_weights(), shared=shared)}, **params)


DOUBLING = ExpertMatrix(values=torch.full((1, 1, 1), 2.0, dtype=BF16), scale=None)


def test_the_shared_expert_goes_on_without_its_clamp():
    finished = tail(shared_path([12.0, 3.0], [30.0], 60.0), 65.0)
    wrong = shared_no_clamp(finished, with_shared_w2(DOUBLING, **SILU))
    assert (wrong.shared.activation.item(), wrong.shared.output.item()) == (36.0, 72.0)
    assert wrong.output.item() == 77.0


def test_a_quantised_shared_expert_goes_on_in_its_groups():
    codes = torch.full((1, 128), 320.0).to(torch.float8_e4m3fn)
    word = mn_major(torch.tensor([[0x7D]], dtype=torch.int32))
    ones = ExpertMatrix(
        values=torch.ones(1, 1, 128).to(torch.float8_e4m3fn),
        scale=mn_major(torch.tensor([[[0x7F]]], dtype=torch.int32)),
    )
    finished = tail(shared_path(WIDE[0], [80.0] * 128, 10240.0, codes, word), 10240.0)
    wrong = shared_no_clamp(finished, with_shared_w2(ones, **SILU)).shared
    assert wrong.hidden_states.to(torch.float32).unique().tolist() == [384.0]
    assert wrong.output.item() == 12288.0


@pytest.mark.parametrize(
    ("reduced", "summand"), [(None, 77.0), (torch.ones(1, 1), 65.0)], ids=["waits", "is taken"]
)
def test_a_summand_changes_with_the_output_until_its_sum_is_taken(reduced, summand):
    before = torch.tensor([[65.0]], dtype=BF16)
    shared = shared_path([12.0, 3.0], [30.0], 60.0)
    finished = tail(shared, 65.0, summand=before, reduced=reduced)
    wrong = shared_no_clamp(finished, with_shared_w2(DOUBLING, **SILU))
    assert (wrong.summand.item(), wrong.output.item()) == (summand, 77.0)


@pytest.mark.parametrize(
    "shared",
    [None, shared_path([12.0, 3.0], [36.0], 72.0)],
    ids=["none here", "of a model that does not clamp"],
)
def test_without_a_clamp_the_shared_expert_stays(shared):
    finished = tail(shared, 5.0)
    assert shared_no_clamp(finished, with_shared_w2(DOUBLING, **SILU)) is finished

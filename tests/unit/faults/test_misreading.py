"""Faults of reading a checkpoint: which tensors change, how, and where nothing is to be misread."""

from dataclasses import dataclass, replace

import pytest
import torch

from moe.faults.misreading import (
    MisreadExperts,
    fp4_nibbles_swapped,
    fp4_scale_group_of_128,
    per_tensor_scale_of_gate_for_up,
    requant_skipped,
    requant_without_pow2,
    requant_wrong_attr,
)
from moe.formats import QuantRecipe, ScaleFormat
from moe.weight_preparation import prepare_blocks
from moe.weights import ExpertMatrix, ExpertWeights
from topology.layout import ParallelLayout

E4M3 = torch.float8_e4m3fn
TWO_RANKS = ParallelLayout(attn_dp=2, ep=2)


@dataclass(frozen=True)
class Source:
    """Every expert's two matrices are these."""

    w13: ExpertMatrix
    w2: ExpertMatrix

    def experts(self, expert_ids):
        return ExpertWeights(w13=self.w13, w2=self.w2)


@dataclass(frozen=True)
class Plan:
    recipe: QuantRecipe
    weights: object
    scale_format: ScaleFormat = ScaleFormat.UE8M0
    num_experts: int = 2
    layout: ParallelLayout = TWO_RANKS
    redundant: int = 0
    shuffled_by: int | None = None


def blocks(scale):
    """One block whose largest code is 448, as quantisers leave it."""
    values = torch.tensor([[[448.0, -3.0]]]).to(E4M3)
    return ExpertMatrix(values=values, scale=torch.tensor([[[scale]]]))


def fp8(scale=0.3, scale_format=ScaleFormat.UE8M0):
    source = Source(w13=blocks(scale), w2=blocks(scale))
    return Plan(QuantRecipe.FP8_BLOCK128, source, scale_format)


def per_tensor(*scales):
    w13 = ExpertMatrix(values=torch.zeros(1, 2, 1).to(E4M3), scale=torch.tensor([scales]))
    w2 = ExpertMatrix(values=torch.zeros(1, 1, 1).to(E4M3), scale=torch.tensor([[0.5]]))
    return Plan(QuantRecipe.FP8_PER_TENSOR, Source(w13=w13, w2=w2))


def fp4(recipe=QuantRecipe.MXFP4_W4A8, values=(0x21,), scale=tuple(range(8))):
    matrix = ExpertMatrix(
        values=torch.tensor([[values]], dtype=torch.uint8),
        scale=torch.tensor([[scale]], dtype=torch.uint8),
        group_size=32,
    )
    return Plan(recipe, Source(w13=matrix, w2=matrix))


def read(fault, plan):
    """What rank 1 reads; fails where the fault leaves the plan alone."""
    edited = fault(plan, {}, 1)
    assert edited is not plan
    assert replace(edited, weights=plan.weights) == plan
    return edited.weights.experts((1,))


@pytest.mark.parametrize(
    ("fault", "of_w13", "of_w2"),
    [
        (requant_skipped, 0.5, 0.5),
        (requant_wrong_attr, 0.3, 0.5),
        (requant_without_pow2, 0.25, 0.25),
    ],
)
def test_scales_lose_their_mantissas_upwards_or_downwards(fault, of_w13, of_w2):
    weights = read(fault, fp8(0.3))
    found = (weights.w13.scale.item(), weights.w2.scale.item())
    assert found == pytest.approx((of_w13, of_w2))


@pytest.mark.parametrize(
    ("fault", "exponent"), [(requant_skipped, 126), (requant_without_pow2, 125)]
)
def test_codes_pass_the_second_quantising_as_they_are(fault, exponent):
    prepared = prepare_blocks(read(fault, fp8(0.3)).w13, ScaleFormat.UE8M0)
    assert prepared.values.to(torch.float32).flatten().tolist() == [448.0, -3.0]
    assert prepared.scale.item() == exponent


@pytest.mark.parametrize("fault", [requant_skipped, requant_wrong_attr, requant_without_pow2])
@pytest.mark.parametrize(
    "plan",
    [fp8(0.5), fp8(0.3, ScaleFormat.FP32), per_tensor(0.3, 0.2), fp4(QuantRecipe.MXFP4_AS_FP8)],
    ids=["powers of two", "fp32 scales", "one scale a matrix", "fp4 turned into fp8"],
)
def test_what_is_not_rounded_a_second_time_cannot_be_left_out(fault, plan):
    assert fault(plan, {}, 1) is plan


def test_gates_scale_counts_for_up():
    weights = read(per_tensor_scale_of_gate_for_up, per_tensor(0.25, 0.75))
    assert (weights.w13.scale.tolist(), weights.w2.scale.item()) == ([[0.25, 0.25]], 0.5)


@pytest.mark.parametrize(
    "plan", [per_tensor(0.25, 0.25), fp8(), fp4()], ids=["equal scales", "blocks", "fp4"]
)
def test_without_two_scales_there_is_none_to_take_for_the_other(plan):
    assert per_tensor_scale_of_gate_for_up(plan, {}, 1) is plan


@pytest.mark.parametrize("recipe", [QuantRecipe.MXFP4_W4A8, QuantRecipe.MXFP4_AS_FP8])
def test_the_halves_of_a_byte_change_places(recipe):
    weights = read(fp4_nibbles_swapped, fp4(recipe, values=(0x21, 0x80)))
    assert weights.w13.values.flatten().tolist() == [0x12, 0x08]
    assert weights.w2.values.flatten().tolist() == [0x12, 0x08]


def test_a_scale_of_32_columns_is_taken_for_128():
    weights = read(fp4_scale_group_of_128, fp4(scale=range(10, 18)))
    assert weights.w13.scale.flatten().tolist() == [10, 10, 10, 10, 11, 11, 11, 11]
    assert weights.w2.scale.flatten().tolist() == [10, 10, 10, 10, 11, 11, 11, 11]


@pytest.mark.parametrize("fault", [fp4_nibbles_swapped, fp4_scale_group_of_128])
@pytest.mark.parametrize("plan", [fp8(), per_tensor(0.3, 0.2)], ids=["blocks", "per tensor"])
def test_a_checkpoint_without_fp4_has_no_halves_and_no_groups_of_32(fault, plan):
    assert fault(plan, {}, 1) is plan


def test_common_weights_are_not_misread():
    class Common:
        def common(self):
            return "common"

        def ideal_expert(self, expert_id):
            return expert_id

        def ideal_shared(self):
            return "shared"

    wrong = MisreadExperts(source=Common(), misread=lambda weights: weights)
    assert (wrong.common(), wrong.ideal_expert(2), wrong.ideal_shared()) == ("common", 2, "shared")


def test_plans_of_two_faults_never_read_alike():
    """One is gone when the other is made, so that an address may come again."""
    read_as = {
        fault.__name__: {repr(fault(fp8(), {}, 1).weights.misread) for _ in range(3)}
        for fault in (requant_skipped, requant_without_pow2)
    }
    first, second = read_as.values()
    assert len(first) == len(second) == 1
    assert not first & second

"""Groups that share a scale stay whole on both sides of both GEMMs, recipe by recipe."""

import pytest

from scenarios.rules import RuleKind, check_rules
from tests.unit.scenarios.rule_cases import (
    GPT_OSS,
    GROUPS_OF_32,
    KEEP_FP32,
    KIMI_K3,
    LL,
    MOE_TP2,
    MXFP8,
    STANDARD,
    V2,
    WHOLE_SHARED,
    build,
)

HIDDEN, WIDTH = "model.overrides.hidden_size", "model.overrides.moe_intermediate_size"
MIXTRAL = {"model.preset": "mixtral"}
OSS_SIZES = "model.overrides"
FP4 = {"moe.recipe": "mxfp4_w4a8"}
MOE_TP4 = {
    "parallel": {"world_size": 4, "attention": {"dp": 4}, "moe": {"ep": 1, "tp": 4}},
    "batch.tokens": [1, 1, 1, 1],
}

# Changes to the right scenario -> what the rule says of them.
SPLIT = {
    "fp8 shards of 192": (
        STANDARD | WHOLE_SHARED | MOE_TP2 | {WIDTH: 384},
        "fp8_block128 needs whole groups; split: moe_intermediate_size(384) / moe tp(2) = 192 into "
        "128s",
    ),
    "gpt-oss in fp8 blocks": (
        GPT_OSS,
        "fp8_block128 needs whole groups; split: hidden_size(2880) into 128s, "
        "moe_intermediate_size(2880) / moe tp(1) = 2880 into 128s",
    ),
    "mxfp8 with half a group of columns": (
        STANDARD | MIXTRAL | MXFP8 | {HIDDEN: 272},
        "mxfp8 needs whole groups; split: hidden_size(272) into 32s",
    ),
    "mxfp8 with half a group in GEMM2": (
        STANDARD | MIXTRAL | MXFP8 | {WIDTH: 144},
        "mxfp8 needs whole groups; split: moe_intermediate_size(144) / moe tp(1) = 144 into 32s",
    ),
    "mxfp8 on deepep_normal's wire": (
        MXFP8 | GROUPS_OF_32,
        "mxfp8 needs whole groups; split: hidden_size(288) into 128s",
    ),
    "mxfp8 on deepep_ll's wire": (
        LL | MXFP8 | GROUPS_OF_32,
        "mxfp8 needs whole groups; split: hidden_size(288) into 128s",
    ),
    "situ in slabs has groups of 128": (
        KIMI_K3
        | STANDARD
        | MXFP8
        | {"moe.layout": "masked", "model.overrides": {"moe_intermediate_size": 96}},
        "mxfp8 needs whole groups; split: moe_intermediate_size(96) / moe tp(1) = 96 into 128s",
    ),
    "the shared expert of mxfp4 is fp8": (
        STANDARD | {"moe.recipe": "mxfp4_w4a8", "moe.shared_experts": "replicated", WIDTH: 192},
        "mxfp4_w4a8 needs whole groups; split: moe_intermediate_size(192) / moe tp(1) = 192 into "
        "128s, shared_intermediate_size(192) into 128s",
    ),
    "fp4 of gpt-oss is stored in 32s whatever is padded": (
        GPT_OSS | FP4 | {OSS_SIZES: {"hidden_size": 1000, "intermediate_size": 33}},
        "mxfp4_w4a8 needs whole groups; split: hidden_size(1000) as stored into 32s, "
        "moe_intermediate_size(33) as stored into 32s",
    ),
    "fp4 of gpt-oss turned into fp8 is stored in 32s too": (
        GPT_OSS | {"moe.recipe": "mxfp4_as_fp8", OSS_SIZES: {"hidden_size": 48}},
        "mxfp4_as_fp8 needs whole groups; split: hidden_size(48) as stored into 32s",
    ),
}


@pytest.mark.parametrize("case", SPLIT)
def test_a_group_that_is_split_is_named_with_its_size(right, case):
    changes, message = SPLIT[case]
    (broken,) = check_rules(*build(right, changes)).problems
    assert (broken.name, broken.message) == ("quantisation_groups_are_whole", message)


def test_a_share_of_a_padded_axis_is_named_with_its_padding(right):
    changes = GPT_OSS | FP4 | STANDARD | MOE_TP4 | {OSS_SIZES: {"intermediate_size": 160}}
    messages = {rule.name: rule.message for rule in check_rules(*build(right, changes)).problems}
    assert messages["quantisation_groups_are_whole"] == (
        "mxfp4_w4a8 needs whole groups; split: moe_intermediate_size(160) padded to 256 / moe "
        "tp(4) = 64 into 128s"
    )


def test_a_shard_of_the_shared_expert_holds_whole_groups_of_its_own_recipe(right):
    changes = STANDARD | {"moe.recipe": "mxfp4_w4a8"}
    (broken,) = check_rules(*build(right, changes)).problems
    assert broken.message == (
        "shared_intermediate_size(128) / world_size(2) = 64, and fp8_block128 needs whole groups "
        "of 128; use shared_experts: replicated"
    )


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4_w4a8"])
def test_power_of_two_scales_have_no_meaning_on_sm90_waived_or_not(right, recipe):
    changes = {"moe.recipe": recipe, "platform": "sm90", "allow_unsupported": True}
    (broken,) = check_rules(*build(right, changes)).problems
    assert (broken.name, broken.kind) == ("recipe_has_its_scales_on_platform", RuleKind.SEMANTIC)


def test_situ_in_deepep_v2_may_be_waived(right):
    changes = V2 | KIMI_K3 | {"moe.recipe": "mxfp8", "allow_unsupported": True}
    report = check_rules(*build(right, changes))
    assert report.problems == ()
    assert any("deepep_v2 asserts silu" in note for note in report.notes)


@pytest.mark.parametrize(
    "changes", [MXFP8, LL | MXFP8, V2], ids=["deepep_normal", "deepep_ll", "fp8_block128"]
)
def test_fp32_is_kept_for_no_other_pair(right, changes):
    (broken,) = check_rules(*build(right, changes | {KEEP_FP32: True})).problems
    assert (broken.name, broken.kind) == (
        "fp32_is_kept_for_deepep_v2_with_mxfp8",
        RuleKind.SEMANTIC,
    )


def test_kernels_take_or_refuse_padded_sizes(right):
    """2880 columns are none of DeepEP's; padded to 3072 they are."""
    changes = GPT_OSS | LL | {"moe.recipe": "mxfp4_w4a8", "moe.strict_shapes": True}
    assert check_rules(*build(right, changes)).problems == ()

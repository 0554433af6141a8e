"""The table of recipes, by hand: groups, load paths, shared experts."""

import pytest

from moe.formats import (
    ActivationKind,
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    QuantRecipe,
    ScaleFormat,
)
from moe.golden import activation_group, middle_group, wire_group
from moe.recipes import RECIPES, LoadPath, WeightFormat

SILU = GatedActivation()
OAI = GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702)
SITU = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)
NONE, FP32, UE8M0 = ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0
EVERY_RECIPE = pytest.mark.parametrize("recipe", QuantRecipe)


def test_every_recipe_has_a_row_of_its_own_name():
    assert {name: row.name for name, row in RECIPES.items()} == {name: name for name in QuantRecipe}


@pytest.mark.parametrize(
    ("recipe", "checkpoint", "block"),
    [
        (QuantRecipe.BF16, WeightFormat.BF16, None),
        (QuantRecipe.FP8_BLOCK128, WeightFormat.FP8_BLOCK128, (128, 128)),
        (QuantRecipe.FP8_PER_TENSOR, WeightFormat.FP8_PER_TENSOR, (128, 128)),
        (QuantRecipe.MXFP8, WeightFormat.MXFP8, (1, 32)),
        (QuantRecipe.MXFP4_W4A8, WeightFormat.MXFP4, (1, 32)),
        (QuantRecipe.MXFP4_AS_FP8, WeightFormat.MXFP4, (128, 128)),
    ],
)
def test_weights_lie_as_the_recipe_has_them(recipe, checkpoint, block):
    assert (RECIPES[recipe].checkpoint, RECIPES[recipe].weight_block) == (checkpoint, block)


@pytest.mark.parametrize(
    ("recipe", "activation", "wire"),
    [
        (QuantRecipe.BF16, None, None),
        (QuantRecipe.FP8_BLOCK128, 128, 128),
        (QuantRecipe.FP8_PER_TENSOR, 128, 128),
        (QuantRecipe.MXFP8, 32, 128),
        (QuantRecipe.MXFP4_W4A8, 128, 128),
        (QuantRecipe.MXFP4_AS_FP8, 128, 128),
    ],
)
def test_activations_and_the_wire_have_groups_of_their_own(recipe, activation, wire):
    assert (RECIPES[recipe].activation_group, RECIPES[recipe].wire_group) == (activation, wire)


@pytest.mark.parametrize(
    ("recipe", "shared"),
    [
        (QuantRecipe.BF16, QuantRecipe.BF16),
        (QuantRecipe.FP8_BLOCK128, QuantRecipe.FP8_BLOCK128),
        (QuantRecipe.FP8_PER_TENSOR, QuantRecipe.FP8_PER_TENSOR),
        (QuantRecipe.MXFP8, QuantRecipe.MXFP8),
        (QuantRecipe.MXFP4_W4A8, QuantRecipe.FP8_BLOCK128),
        (QuantRecipe.MXFP4_AS_FP8, QuantRecipe.FP8_BLOCK128),
    ],
)
def test_fp4_checkpoints_have_a_shared_expert_in_fp8_blocks(recipe, shared):
    assert RECIPES[recipe].shared is shared


def test_the_microscaled_gemms_alone_read_nothing_but_powers_of_two():
    needing = {name for name, row in RECIPES.items() if row.needs_ue8m0}
    assert needing == {QuantRecipe.MXFP8, QuantRecipe.MXFP4_W4A8}


@pytest.mark.parametrize("platform", [FP32, UE8M0])
@EVERY_RECIPE
def test_all_recipes_but_bf16_have_the_scales_of_the_platform(recipe, platform):
    expected = NONE if recipe is QuantRecipe.BF16 else platform
    assert RECIPES[recipe].scale_format(platform) is expected


@pytest.mark.parametrize(
    ("recipe", "scale_format", "path"),
    [
        (QuantRecipe.BF16, NONE, LoadPath.KEEP),
        (QuantRecipe.FP8_BLOCK128, FP32, LoadPath.KEEP),
        (QuantRecipe.FP8_BLOCK128, UE8M0, LoadPath.REQUANTISE),
        (QuantRecipe.FP8_PER_TENSOR, FP32, LoadPath.MERGE),
        (QuantRecipe.FP8_PER_TENSOR, UE8M0, LoadPath.MERGE),
        (QuantRecipe.MXFP8, UE8M0, LoadPath.PACK),
        (QuantRecipe.MXFP4_W4A8, UE8M0, LoadPath.PACK),
        (QuantRecipe.MXFP4_AS_FP8, FP32, LoadPath.FP4_TO_FP8),
        (QuantRecipe.MXFP4_AS_FP8, UE8M0, LoadPath.FP4_TO_FP8_REQUANTISE),
    ],
)
def test_a_checkpoint_is_loaded_by_the_path_of_its_recipe(recipe, scale_format, path):
    assert RECIPES[recipe].load_path(scale_format) is path


FIRST_TWO_MODES = (
    DispatchFormat.DEEPEP_NORMAL,
    DispatchFormat.DEEPEP_LL,
    DispatchFormat.MOONCAKE,
    DispatchFormat.NIXL,
)


@pytest.mark.parametrize("dispatcher", DispatchFormat)
def test_mxfp8_rows_have_128_columns_a_scale_behind_deepeps_first_two_modes(dispatcher):
    expected = 128 if dispatcher in FIRST_TWO_MODES else 32
    assert RECIPES[QuantRecipe.MXFP8].input_group(dispatcher, bf16_wire=False) == expected


@pytest.mark.parametrize("dispatcher", DispatchFormat)
def test_behind_a_bf16_wire_mxfp8_rows_have_32_columns_a_scale(dispatcher):
    assert RECIPES[QuantRecipe.MXFP8].input_group(dispatcher, bf16_wire=True) == 32


@pytest.mark.parametrize("bf16_wire", [False, True])
@pytest.mark.parametrize("dispatcher", DispatchFormat)
def test_bf16_rows_have_no_scale(dispatcher, bf16_wire):
    assert RECIPES[QuantRecipe.BF16].input_group(dispatcher, bf16_wire=bf16_wire) is None


MIDDLE_GROUPS = [
    (SILU, GemmLayout.MASKED, 32),
    (SILU, GemmLayout.CONTIG, 32),
    (OAI, GemmLayout.MASKED, 32),
    (OAI, GemmLayout.CONTIG, 32),
    (SITU, GemmLayout.MASKED, 128),
    (SITU, GemmLayout.CONTIG, 32),
]


@pytest.mark.parametrize(
    ("activation", "layout", "group"),
    MIDDLE_GROUPS,
    ids=[f"{activation.kind}-{layout}" for activation, layout, _ in MIDDLE_GROUPS],
)
def test_situ_in_slabs_alone_has_128_columns_a_scale_between_the_gemms(activation, layout, group):
    assert RECIPES[QuantRecipe.MXFP8].middle_group(activation, layout) == group


def test_situ_in_slabs_of_bf16_has_no_scale():
    assert RECIPES[QuantRecipe.BF16].middle_group(SITU, GemmLayout.MASKED) is None


@EVERY_RECIPE
def test_the_golden_has_the_same_groups(recipe):
    row = RECIPES[recipe]
    assert activation_group(recipe) == row.activation_group
    for dispatcher in DispatchFormat:
        assert wire_group(recipe, dispatcher) == row.input_group(dispatcher, bf16_wire=False)
    for activation, layout, _ in MIDDLE_GROUPS:
        assert middle_group(recipe, activation, layout) == row.middle_group(activation, layout)

"""What a golden model may be asked for."""

import pytest

from moe.formats import (
    ActivationKind,
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    QuantRecipe,
    ScaleFormat,
    ScoringFunc,
)
from moe.golden import GoldenModel, GoldenRouting, RoundingPath, wire_group

SILU = GatedActivation(limit=10.0)
SITU = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)


def model(
    recipe: QuantRecipe,
    scale_format: ScaleFormat,
    activation: GatedActivation = SILU,
    layout: GemmLayout = GemmLayout.CONTIG,
) -> GoldenModel:
    return GoldenModel(
        routing=GoldenRouting(top_k=2, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=True),
        routed_scaling_factor=1.5,
        activation=activation,
        recipe=recipe,
        scale_format=scale_format,
        path=RoundingPath(folds_factor=True, layout=layout),
    )


@pytest.mark.parametrize(
    ("recipe", "scale_format", "group"),
    [
        (QuantRecipe.BF16, ScaleFormat.NONE, None),
        (QuantRecipe.FP8_BLOCK128, ScaleFormat.FP32, 128),
        (QuantRecipe.FP8_BLOCK128, ScaleFormat.UE8M0, 128),
        (QuantRecipe.FP8_PER_TENSOR, ScaleFormat.FP32, 128),
        (QuantRecipe.MXFP8, ScaleFormat.UE8M0, 32),
        (QuantRecipe.MXFP4_W4A8, ScaleFormat.UE8M0, 128),
        (QuantRecipe.MXFP4_AS_FP8, ScaleFormat.UE8M0, 128),
    ],
)
def test_a_recipe_sets_the_columns_that_share_a_scale(recipe, scale_format, group):
    assert model(recipe, scale_format).activation_group == group


@pytest.mark.parametrize(
    ("recipe", "dispatcher", "group"),
    [
        (QuantRecipe.BF16, DispatchFormat.DEEPEP_NORMAL, None),
        (QuantRecipe.FP8_BLOCK128, DispatchFormat.STANDARD, 128),
        (QuantRecipe.MXFP8, DispatchFormat.STANDARD, 32),
        (QuantRecipe.MXFP8, DispatchFormat.FLASHINFER, 32),
        (QuantRecipe.MXFP8, DispatchFormat.DEEPEP_V2, 32),
        (QuantRecipe.MXFP8, DispatchFormat.DEEPEP_NORMAL, 128),
        (QuantRecipe.MXFP8, DispatchFormat.DEEPEP_LL, 128),
        (QuantRecipe.MXFP8, DispatchFormat.NIXL, 128),
        (QuantRecipe.MXFP4_W4A8, DispatchFormat.DEEPEP_V2, 128),
    ],
)
def test_deepeps_first_two_modes_share_a_scale_among_128_columns(recipe, dispatcher, group):
    assert wire_group(recipe, dispatcher) == group


@pytest.mark.parametrize(
    ("activation", "layout", "group"),
    [
        (SILU, GemmLayout.MASKED, 32),
        (SILU, GemmLayout.CONTIG, 32),
        (SITU, GemmLayout.MASKED, 128),
        (SITU, GemmLayout.CONTIG, 32),
    ],
    ids=["silu-masked", "silu-compact", "situ-masked", "situ-compact"],
)
def test_situ_in_slabs_shares_a_scale_among_128_columns_between_the_gemms(
    activation, layout, group
):
    assert model(QuantRecipe.MXFP8, ScaleFormat.UE8M0, activation, layout).middle_group == group


def test_situ_in_slabs_of_bf16_has_no_scale():
    assert model(QuantRecipe.BF16, ScaleFormat.NONE, SITU, GemmLayout.MASKED).middle_group is None


@pytest.mark.parametrize(
    ("recipe", "scale_format"),
    [(QuantRecipe.BF16, ScaleFormat.FP32), (QuantRecipe.MXFP8, ScaleFormat.NONE)],
    ids=["scales_for_bf16", "none_for_mxfp8"],
)
def test_scales_that_do_not_fit_the_recipe_are_refused(recipe, scale_format):
    with pytest.raises(ValueError, match=f"recipe {recipe} cannot have {scale_format} scales"):
        model(recipe, scale_format)

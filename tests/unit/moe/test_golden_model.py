"""What a golden model may be asked for."""

import pytest

from moe.formats import QuantRecipe, ScaleFormat, ScoringFunc
from moe.golden import GoldenModel, GoldenRouting


def model(recipe: QuantRecipe, scale_format: ScaleFormat) -> GoldenModel:
    return GoldenModel(
        routing=GoldenRouting(top_k=2, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=True),
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        recipe=recipe,
        scale_format=scale_format,
    )


@pytest.mark.parametrize(
    ("recipe", "scale_format", "group"),
    [
        (QuantRecipe.BF16, ScaleFormat.NONE, None),
        (QuantRecipe.FP8_BLOCK128, ScaleFormat.FP32, 128),
        (QuantRecipe.FP8_BLOCK128, ScaleFormat.UE8M0, 128),
        (QuantRecipe.MXFP8, ScaleFormat.UE8M0, 32),
        (QuantRecipe.MXFP4_W4A8, ScaleFormat.UE8M0, 128),
        (QuantRecipe.MXFP4_AS_FP8, ScaleFormat.UE8M0, 128),
    ],
)
def test_a_recipe_sets_the_columns_that_share_a_scale(recipe, scale_format, group):
    assert model(recipe, scale_format).activation_group == group


def test_a_recipe_that_is_not_modelled_is_refused():
    with pytest.raises(ValueError, match="fp8_per_tensor has no golden model; modelled: bf16, fp8"):
        model(QuantRecipe.FP8_PER_TENSOR, ScaleFormat.FP32)


@pytest.mark.parametrize(
    ("recipe", "scale_format"),
    [(QuantRecipe.BF16, ScaleFormat.FP32), (QuantRecipe.MXFP8, ScaleFormat.NONE)],
    ids=["scales_for_bf16", "none_for_mxfp8"],
)
def test_scales_that_do_not_fit_the_recipe_are_refused(recipe, scale_format):
    with pytest.raises(ValueError, match=f"recipe {recipe} cannot have {scale_format} scales"):
        model(recipe, scale_format)

"""The shipped sweep of recipes against the matrix of what has a meaning, written by hand."""

from collections import Counter
from pathlib import Path

import pytest

from scenarios.sweep import load_path

# Recipe -> platforms whose GEMMs read its scales and have kernels for it.
# Source: SGLang 0.5.21, deep_gemm_wrapper/configurer.py; moe_runner/deep_gemm.py.
EVERYWHERE = ("sm90", "sm100", "sm120")
PLATFORMS = {
    "bf16": EVERYWHERE,
    "fp8_block128": EVERYWHERE,
    "fp8_per_tensor": EVERYWHERE,
    "mxfp8": ("sm100",),
    "mxfp4_w4a8": ("sm100", "sm120"),
    "mxfp4_as_fp8": EVERYWHERE,
}
LAYOUTS = {
    "standard": ("masked", "compact"),
    "flashinfer": ("masked", "compact"),
    "deepep_normal": ("compact",),
    "deepep_ll": ("masked",),
    "deepep_v2_extend": ("compact",),
    "deepep_v2_decode": ("masked",),
}
WITH_V2 = ("bf16", "fp8_block128", "mxfp8", "mxfp4_as_fp8")
WITHOUT_SLABS_ON_SM120 = ("standard", "flashinfer")


@pytest.fixture(scope="module")
def recipes():
    return load_path(Path(__file__).parents[3] / "scenarios" / "sweeps" / "recipes.yaml")


def has_a_meaning(recipe: str, dispatcher: str, layout: str, platform: str) -> bool:
    if dispatcher.startswith("deepep_v2") and recipe not in WITH_V2:
        return False
    return (dispatcher, layout, platform) not in {
        (without, "masked", "sm120") for without in WITHOUT_SLABS_ON_SM120
    }


def test_the_legal_rows_of_recipes_are_the_matrix(recipes):
    wanted = {
        (recipe, dispatcher, layout, platform)
        for recipe, platforms in PLATFORMS.items()
        for platform in platforms
        for dispatcher, layouts in LAYOUTS.items()
        for layout in layouts
        if has_a_meaning(recipe, dispatcher, layout, platform)
    }
    axes = ("moe.recipe", "dispatcher", "moe.layout", "platform")
    assert {tuple(row.values[axis] for axis in axes) for row, _ in recipes.legal} == wanted


def test_recipes_has_100_legal_rows_of_216(recipes):
    assert (len(recipes.legal), recipes.num_rows) == (100, 216)


def test_what_a_recipe_cannot_have_is_refused_by_the_rules_on_recipes(recipes):
    refusing = Counter(rule.name for _, rules in recipes.refused for rule in rules)
    assert {name: rows for name, rows in refusing.items() if "recipe" in name} == {
        "recipe_has_its_scales_on_platform": 24,
        "recipe_has_kernels_on_platform": 12,
        "deepep_v2_takes_the_recipe": 24,
    }


def test_recipes_has_a_use_for_each_of_its_values(recipes):
    assert recipes.values_without_a_row() == []

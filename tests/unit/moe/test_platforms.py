"""Each GPU generation's facts, against literals."""

import pytest

from moe.formats import Platform, QuantRecipe, ScaleFormat
from moe.platforms import PLATFORMS

SM90, SM100, SM120 = Platform.SM90, Platform.SM100, Platform.SM120


def test_every_platform_has_its_facts():
    assert {name: facts.name for name, facts in PLATFORMS.items()} == {p: p for p in Platform}


@pytest.mark.parametrize(
    ("recipe", "platform", "stored"),
    [
        (QuantRecipe.FP8_BLOCK128, SM90, ScaleFormat.FP32),
        (QuantRecipe.FP8_BLOCK128, SM100, ScaleFormat.UE8M0),
        (QuantRecipe.FP8_BLOCK128, SM120, ScaleFormat.UE8M0),
        (QuantRecipe.BF16, SM90, ScaleFormat.NONE),
        (QuantRecipe.BF16, SM100, ScaleFormat.NONE),
        (QuantRecipe.BF16, SM120, ScaleFormat.NONE),
    ],
    ids=str,
)
def test_scales_are_stored_as_the_platforms_gemm_reads_them(recipe, platform, stored):
    assert PLATFORMS[platform].scale_format(recipe) is stored


@pytest.mark.parametrize(
    ("platform", "wire", "slabs", "wide"),
    [
        (SM90, ScaleFormat.FP32, True, None),
        (SM100, ScaleFormat.UE8M0, True, None),
        (SM120, ScaleFormat.FP32, False, 1024),
    ],
    ids=str,
)
def test_flags_are_those_of_the_generation(platform, wire, slabs, wide):
    facts = PLATFORMS[platform]
    assert facts.low_latency_scales is wire
    assert facts.has_slabs is slabs
    assert facts.wide_segment_rows == wide


@pytest.mark.parametrize(
    ("platform", "routes", "experts", "rows"),
    [
        (SM100, 42, 1, 64),
        (SM100, 10, 1, 32),
        (SM100, 97, 1, 128),
        (SM100, 129, 1, 128),
        (SM100, 300, 1, 128),
        (SM100, 0, 4, 32),
        (SM100, 32, 1, 32),
        (SM100, 33, 1, 64),
        (SM100, 96, 1, 96),
        (SM100, 168, 4, 64),
        (SM100, 165, 4, 64),
        (SM90, 10, 1, 128),
        (SM90, 300, 1, 128),
        (SM120, 96, 1, 128),
        (SM120, 65, 1, 128),
        (SM120, 64, 1, 64),
        (SM120, 10, 1, 32),
        (SM120, 300, 1, 128),
    ],
)
def test_the_tile_height_follows_the_mean_rows_of_an_expert(platform, routes, experts, rows):
    assert PLATFORMS[platform].segment_alignment(routes, experts) == rows


@pytest.mark.parametrize("rows", [*range(0, 257, 16), 31, 33, 95, 97, 127, 129])
def test_sm100_tiles_are_those_of_the_librarys_steps_down(rows):
    """From 224 by 32 as long as the next one holds the rows; over 128 SGLang takes 128."""
    block = 224
    while block - 32 >= max(rows, 32):
        block -= 32
    assert PLATFORMS[SM100].segment_alignment(rows, 1) == min(block, 128)


EVERYWHERE = (
    QuantRecipe.BF16,
    QuantRecipe.FP8_BLOCK128,
    QuantRecipe.FP8_PER_TENSOR,
    QuantRecipe.MXFP4_AS_FP8,
)


@pytest.mark.parametrize("platform", Platform)
@pytest.mark.parametrize("recipe", EVERYWHERE)
def test_bf16_and_fp8_blocks_have_kernels_everywhere(recipe, platform):
    assert PLATFORMS[platform].refusal(recipe) is None


@pytest.mark.parametrize(
    ("recipe", "platform"),
    [
        (QuantRecipe.MXFP8, SM100),
        (QuantRecipe.MXFP4_W4A8, SM100),
        (QuantRecipe.MXFP4_W4A8, SM120),
    ],
    ids=str,
)
def test_a_microscaled_recipe_has_kernels_where_it_is_native(recipe, platform):
    assert PLATFORMS[platform].refusal(recipe) is None


@pytest.mark.parametrize(
    ("recipe", "platform", "native"),
    [
        (QuantRecipe.MXFP8, SM90, "bf16, fp8_block128"),
        (QuantRecipe.MXFP4_W4A8, SM90, "bf16, fp8_block128"),
        (QuantRecipe.MXFP8, SM120, "bf16, fp8_block128, mxfp4_w4a8"),
    ],
    ids=str,
)
def test_a_recipe_without_kernels_is_refused_with_those_there_are(recipe, platform, native):
    assert PLATFORMS[platform].refusal(recipe) == (
        f"recipe {recipe} has no DeepGEMM kernels on {platform} (native there: {native})"
    )


@pytest.mark.parametrize(
    ("platform", "device", "gib"), [(SM90, "H100", 80), (SM100, "B200", 180), (SM120, "RTX", 96)]
)
def test_an_emulated_device_has_the_memory_of_a_named_product(platform, device, gib):
    facts = PLATFORMS[platform]
    assert facts.device.startswith(device)
    assert f"{gib} GB" in facts.device
    assert facts.device_bytes == gib * 2**30

"""The choice between slabs and segments, step by step, and the bytes that decide it last."""

from dataclasses import replace

import pytest

from moe.formats import GemmLayout, Platform, QuantRecipe
from moe.layout_choice import LayoutFacts, choose_layout, clamped_slab_problem, slab_peak_bytes
from moe.platforms import PLATFORMS

MASKED, COMPACT = GemmLayout.MASKED, GemmLayout.CONTIG
SM90, SM100, SM120 = (PLATFORMS[platform] for platform in Platform)
FACTS = LayoutFacts(
    num_rows=40,
    num_local_experts=2,
    hidden_size=512,
    intermediate_size=512,
    recipe=QuantRecipe.FP8_BLOCK128,
    swiglu_limit=None,
    platform=SM90,
)
CLAMPED = replace(FACTS, swiglu_limit=10.0)
LARGE = replace(FACTS, num_rows=16384, num_local_experts=512, hidden_size=4096)


@pytest.mark.parametrize(
    ("changes", "row_bytes"),
    [
        # GEMM1's input 512 + 4 scales, its output 2048, GEMM2's input 512 + 4 scales, output 1024.
        ({}, 512 + 4 * 4 + 2048),
        ({"platform": SM100}, 512 + 4 + 2048),
        ({"recipe": QuantRecipe.BF16}, 1024 + 2048),
        ({"recipe": QuantRecipe.MXFP8, "platform": SM100}, 512 + 16 + 2048),
        ({"recipe": QuantRecipe.MXFP8}, 512 + 16 + 2048),
        ({"recipe": QuantRecipe.MXFP4_W4A8, "platform": SM100}, 512 + 4 + 2048),
        ({"hidden_size": 4096, "intermediate_size": 128}, 128 + 4 + 8192),
        ({"hidden_size": 4096}, 512 + 4 * 4 + 8192),
        ({"hidden_size": 128}, 2048 + 512 + 4 * 4),
        ({"hidden_size": 130}, 2048 + 512 + 4 * 4),
    ],
    ids=str,
)
def test_a_row_costs_its_two_dearest_neighbours(changes, row_bytes):
    assert slab_peak_bytes(replace(FACTS, **changes)) == 2 * 256 * row_bytes


@pytest.mark.parametrize(
    ("rows", "height"), [(0, 256), (255, 256), (256, 512), (257, 512), (16384, 16640)]
)
def test_slabs_are_counted_at_full_height(rows, height):
    assert slab_peak_bytes(replace(FACTS, num_rows=rows)) == 2 * height * 2576


def test_the_bytes_of_a_large_layer():
    """512 slabs of 16640 rows of 8192 + 512 + 16 bytes: 69.2 GiB."""
    assert slab_peak_bytes(LARGE) == 512 * 16640 * 8720 == 74_291_609_600


@pytest.mark.parametrize(
    ("limit", "width", "experts", "group", "problem"),
    [
        (None, 100, 64, 32, None),
        (10.0, 512, 64, 128, None),
        (10.0, 1024, 128, 128, None),
        (10.0, 512, 65, 128, "I // 8 >= local experts, 64 < 65"),
        (10.0, 256, 2, 128, "I % 512 == 0, I is 256"),
        (10.0, 640, 2, 128, "I % 512 == 0, I is 640"),
        (10.0, 512, 2, 32, "groups of 128, the recipe has 32"),
    ],
)
def test_a_clamp_lets_slabs_be_where_its_kernel_runs(limit, width, experts, group, problem):
    found = clamped_slab_problem(limit, width, experts, group)
    assert found == (problem and f"the clamping masked kernel wants {problem}")


@pytest.mark.parametrize(
    ("facts", "layout", "reason"),
    [
        (
            replace(FACTS, num_rows=10, num_local_experts=16),
            MASKED,
            "masked: its slabs peak at 10.1 MiB, within 20.0 GiB (25 % of an empty H100 80 GB)",
        ),
        (
            LARGE,
            COMPACT,
            "compact: slabs would peak at 69.2 GiB, over 20.0 GiB (25 % of an empty H100 80 GB)",
        ),
        (
            replace(FACTS, platform=SM120),
            COMPACT,
            "compact: sm120 has no masked layout for these rows",
        ),
        (replace(FACTS, compact_eager=True), COMPACT, "compact: by switch compact_eager"),
        (
            replace(CLAMPED, intermediate_size=256),
            COMPACT,
            "compact: the clamping masked kernel wants I % 512 == 0, I is 256 "
            "(SGLang logs it once)",
        ),
        (replace(FACTS, asked="compact"), COMPACT, "compact: asked for"),
        (replace(LARGE, asked="masked"), MASKED, "masked: asked for"),
    ],
    ids=["fits", "too large", "platform", "switch", "clamp", "compact", "masked"],
)
def test_a_choice_comes_with_its_reason(facts, layout, reason):
    choice = choose_layout(facts)
    assert (choice.layout, choice.reason) == (layout, reason)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (replace(CLAMPED, platform=SM120, compact_eager=True, asked="masked"), "sm120"),
        (replace(CLAMPED, intermediate_size=256, compact_eager=True), "switch"),
        (replace(CLAMPED, intermediate_size=256, asked="compact"), "clamping"),
        (replace(LARGE, asked="compact"), "asked for"),
    ],
    ids=["platform first", "then the switch", "then the clamp", "then what is asked"],
)
def test_the_steps_come_in_upstreams_order(facts, reason):
    assert reason in choose_layout(facts).reason


def test_what_is_asked_for_stands_over_the_clamping_kernel_that_an_emulation_has_not():
    """Real kernels never get here: a rule refuses it for them."""
    asked = replace(CLAMPED, intermediate_size=256, asked="masked")
    choice = choose_layout(asked)
    assert choice.layout is MASKED
    assert choice.reason == (
        "masked: asked for; SGLang would take compact here: the clamping masked kernel wants "
        "I % 512 == 0, I is 256"
    )


@pytest.mark.parametrize(
    ("asked", "width"),
    [("compact", 512), ("masked", 512)],
)
def test_where_the_clamping_kernel_runs_what_is_asked_for_needs_no_more_words(asked, width):
    choice = choose_layout(replace(CLAMPED, intermediate_size=width, asked=asked))
    assert choice.reason == f"{asked}: asked for"


def test_a_clamp_that_fits_leaves_the_choice_to_memory():
    assert choose_layout(CLAMPED).layout is MASKED


def test_the_clamp_is_looked_at_whatever_the_recipe():
    bf16 = replace(CLAMPED, recipe=QuantRecipe.BF16, intermediate_size=256)
    assert choose_layout(bf16).layout is COMPACT


def test_slabs_may_take_the_whole_budget_and_no_byte_more():
    """20 GiB is 160 slabs of 512 rows of 2^18 bytes."""
    fits = replace(
        FACTS,
        num_rows=256,
        num_local_experts=160,
        recipe=QuantRecipe.BF16,
        hidden_size=1 << 16,
        intermediate_size=1 << 15,
    )
    assert slab_peak_bytes(fits) == 160 * 512 * (1 << 18) == 20 * 2**30
    assert choose_layout(fits).layout is MASKED
    assert choose_layout(replace(fits, memory_fraction=0.2499999)).layout is COMPACT


@pytest.mark.parametrize(
    ("fraction", "layout"), [(0.25, COMPACT), (0.9, MASKED), (0.86, COMPACT), (1.0, MASKED)]
)
def test_the_fraction_moves_the_budget(fraction, layout):
    """69.2 of 80 GiB are 0.865."""
    assert choose_layout(replace(LARGE, memory_fraction=fraction)).layout is layout


def test_a_larger_device_has_a_larger_budget():
    """32 GiB of slabs are over a quarter of 80 GiB and of 96, but not of 180."""
    facts = replace(LARGE, num_local_experts=230)
    assert choose_layout(facts).layout is COMPACT
    assert choose_layout(replace(facts, platform=SM100)).layout is MASKED


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_upstreams_own_example(tokens):
    """512 experts, H 4096, I 256 against 42.5 GiB: 8,192 rows fit, 16,384 do not."""
    facts = replace(LARGE, num_rows=tokens, intermediate_size=256, memory_fraction=42.5 / 80)
    assert choose_layout(facts).layout is (MASKED if tokens == 8192 else COMPACT)

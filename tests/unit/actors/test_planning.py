"""What a plan derives from a scenario: scales, layouts, alignment, the shared expert's place."""

import pytest

from actors.planning import contiguous_alignment, scale_format
from actors.resolve import resolve
from moe.formats import GemmLayout, Platform, QuantRecipe, ScaleFormat, SharedExpertMode


@pytest.mark.parametrize(
    ("recipe", "platform", "stored"),
    [
        (QuantRecipe.FP8_BLOCK128, Platform.SM90, ScaleFormat.FP32),
        (QuantRecipe.FP8_BLOCK128, Platform.SM100, ScaleFormat.UE8M0),
        (QuantRecipe.BF16, Platform.SM90, ScaleFormat.NONE),
        (QuantRecipe.BF16, Platform.SM100, ScaleFormat.NONE),
    ],
    ids=str,
)
def test_scales_are_stored_as_the_platforms_gemm_reads_them(recipe, platform, stored):
    assert scale_format(recipe, platform) is stored


@pytest.mark.parametrize(
    ("platform", "routes", "experts", "rows"),
    [
        (Platform.SM100, 42, 1, 64),
        (Platform.SM100, 10, 1, 32),
        (Platform.SM100, 97, 1, 128),
        (Platform.SM100, 300, 1, 128),
        (Platform.SM100, 0, 4, 32),
        (Platform.SM100, 32, 1, 32),
        (Platform.SM100, 33, 1, 64),
        (Platform.SM100, 96, 1, 96),
        (Platform.SM100, 168, 4, 64),
        (Platform.SM100, 165, 4, 64),
        (Platform.SM90, 10, 1, 128),
        (Platform.SM90, 300, 1, 128),
        (Platform.SM120, 96, 1, 128),
        (Platform.SM120, 65, 1, 128),
        (Platform.SM120, 64, 1, 64),
        (Platform.SM120, 10, 1, 32),
        (Platform.SM120, 300, 1, 128),
    ],
)
def test_the_tile_height_follows_the_mean_rows_of_an_expert(platform, routes, experts, rows):
    assert contiguous_alignment(platform, routes, experts) == rows


STANDARD = ("moe.dispatcher=standard", "moe.recipe=bf16")
DECODE = "batch.phase=decode"


def test_rows_of_all_groups_and_all_slots_decide_the_alignment(load):
    """Gathered 5 + 3 rows of 6 slots are 48 routes for 4 local experts: 12 rows each."""
    plan = resolve(load(*STANDARD)).plan
    assert plan.row_alignment == 32


def test_padding_rows_decide_the_alignment_too(load):
    """Two slots of 24 rows hold 288 routes for 4 local experts: 72 each, where tokens are 48."""
    tokens = "batch.tokens=[24, 8]"
    assert resolve(load(*STANDARD, tokens)).plan.row_alignment == 64
    assert resolve(load(*STANDARD, tokens, DECODE)).plan.row_alignment == 96


def test_redundant_slots_share_the_rows(load):
    """24 + 24 rows of 6 slots over 4 local experts are 72 each, over 5 local slots 58."""
    tokens = "batch.tokens=[24, 24]"
    assert resolve(load(*STANDARD, tokens)).plan.row_alignment == 96
    assert resolve(load(*STANDARD, tokens, "moe.redundant_experts=2")).plan.row_alignment == 64


@pytest.mark.parametrize("platform", ["sm90", "sm100"])
def test_an_all_to_all_announces_segments_of_128(load, platform):
    assert resolve(load(f"platform={platform}")).plan.row_alignment == 128


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ((), GemmLayout.CONTIG),
        (STANDARD, GemmLayout.CONTIG),
        ((*STANDARD, "moe.layout=masked"), GemmLayout.MASKED),
        ((*STANDARD, "moe.layout=compact"), GemmLayout.CONTIG),
    ],
    ids=["all to all", "standard", "masked", "compact"],
)
def test_rows_lie_in_slabs_only_where_they_are_asked_for(load, settings, layout):
    assert resolve(load(*settings)).plan.gemm_layout is layout


ONE_GROUP = ("parallel.attention={dp: 1, tp: 2}", "batch.tokens=[8]")
TP1 = "moe.switches.shared_expert_tp1=true"
LOCAL = "moe.switches.dp_shared_expert_local=true"


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ((), SharedExpertMode.REPLICATED),
        (STANDARD, SharedExpertMode.TP_SHARDED),
        ((*STANDARD, TP1), SharedExpertMode.REPLICATED),
        ((*STANDARD, TP1, LOCAL), SharedExpertMode.LOCAL),
        ((*STANDARD, TP1, LOCAL, *ONE_GROUP), SharedExpertMode.REPLICATED),
        ((*STANDARD, "moe.shared_experts=local"), SharedExpertMode.LOCAL),
        ((*STANDARD, "model.overrides.n_shared_experts=0"), None),
        (("model.overrides.n_shared_experts=0",), None),
    ],
    ids=[
        "all to all",
        "standard",
        "tp1",
        "tp1, local",
        "tp1, local, one group",
        "asked for",
        "none",
        "none, all to all",
    ],
)
def test_the_shared_expert_stands_where_dispatcher_and_switches_put_it(load, settings, mode):
    assert resolve(load(*settings)).plan.shared is mode


def test_a_shuffled_placement_is_drawn_from_the_scenarios_seed(load):
    assert resolve(load()).plan.shuffled_by is None
    assert resolve(load("moe.placement=shuffled")).plan.shuffled_by == 7


def test_the_verdict_knows_what_every_physical_slot_holds(load):
    judged = resolve(load("moe.redundant_experts=2")).judged
    assert (judged.slots_per_rank, len(judged.slot_experts)) == (5, 10)
    assert set(judged.slot_experts) == set(range(8))

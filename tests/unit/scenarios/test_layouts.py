"""A scenario's layout: the dispatcher's, or by the rule on the rows of its topology."""

import pytest

from moe.formats import GemmLayout
from scenarios.layouts import is_expanded, layout_choice, rows_into_the_runner
from tests.unit.scenarios.rule_cases import (
    FLASHINFER,
    LL,
    STANDARD,
    TP2,
    V2,
    WHOLE_SHARED,
    build,
)

MASKED, COMPACT = GemmLayout.MASKED, GemmLayout.CONTIG
NO_CLAMP = {"model.overrides.swiglu_limit": None}
DECODE = {"batch.phase": "decode"}
WHOLE = STANDARD | WHOLE_SHARED


@pytest.mark.parametrize(
    ("changes", "layout", "why"),
    [
        ({}, COMPACT, "deepep_normal hands over expert segments"),
        (LL, MASKED, "deepep_ll hands over one slab an expert"),
        (LL | {"moe.dispatcher": "nixl"}, MASKED, "nixl hands over one slab an expert"),
        (V2, COMPACT, "not expanded"),
        (V2 | DECODE, MASKED, "deepep_v2 expanded"),
        (V2 | {"moe.expanded": True}, MASKED, "deepep_v2 expanded"),
        (V2 | DECODE | {"moe.layout": "compact"}, COMPACT, "asked for"),
        (WHOLE, COMPACT, "I % 512 == 0, I is 128"),
        (WHOLE | NO_CLAMP, MASKED, "its slabs peak at"),
        (FLASHINFER | NO_CLAMP, MASKED, "its slabs peak at"),
        (WHOLE | NO_CLAMP | {"platform": "sm120"}, COMPACT, "sm120 has no masked layout"),
        (WHOLE | NO_CLAMP | {"moe.layout": "compact"}, COMPACT, "asked for"),
        (WHOLE | NO_CLAMP | {"moe.switches": {"compact_eager": True}}, COMPACT, "compact_eager"),
        (
            WHOLE | NO_CLAMP | {"moe.switches": {"masked_memory_budget_fraction": 1e-6}},
            COMPACT,
            "over 0.2 MiB (0.0001 % of an empty B200",
        ),
        (LL | {"moe.switches": {"compact_eager": True}}, MASKED, "one slab an expert"),
        (V2 | DECODE | {"platform": "sm120"}, MASKED, "deepep_v2 expanded"),
    ],
)
def test_a_layout_is_chosen_and_says_why(right, changes, layout, why):
    choice = layout_choice(*build(right, changes))
    assert choice.layout is layout
    assert choice.reason.startswith(f"{layout}: ")
    assert why in choice.reason


def test_a_share_of_the_columns_decides_under_moe_tp(right):
    """1024 columns are 512 on each of two ranks, which suits the clamp; 512 are 256."""
    tp = {"parallel.moe": {"ep": 1, "tp": 2}}
    for width, layout in ((1024, MASKED), (512, COMPACT)):
        changes = WHOLE | tp | {"model.overrides.moe_intermediate_size": width}
        assert layout_choice(*build(right, changes)).layout is layout


def test_redundant_slots_count_as_experts(right):
    """520 slots on two ranks are 260, more than 2048 / 8 threads."""
    changes = WHOLE | {
        "model.overrides.n_routed_experts": 512,
        "model.overrides.moe_intermediate_size": 2048,
    }
    assert layout_choice(*build(right, changes)).layout is MASKED
    changes = changes | {"moe.redundant_experts": 8}
    assert layout_choice(*build(right, changes)).layout is COMPACT


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        (WHOLE, 8),
        (WHOLE | TP2, 8),
        (WHOLE | DECODE, 10),
        (FLASHINFER, 8),
        (FLASHINFER | DECODE | {"batch.padding": "sum_len"}, 10),
    ],
    ids=["gathered", "replicated", "padded", "flashinfer prefill", "flashinfer decode"],
)
def test_rows_of_every_rank_and_of_every_slot_enter_the_runner(right, changes, rows):
    """5 and 3 tokens: 8 rows, or two slots of 5."""
    scenario, _ = build(right, changes)
    assert rows_into_the_runner(scenario) == rows


@pytest.mark.parametrize(
    ("changes", "expanded"),
    [
        (V2, False),
        (V2 | DECODE, True),
        (V2 | {"moe.expanded": True}, True),
        (V2 | DECODE | {"moe.expanded": False}, False),
        (DECODE, False),
    ],
)
def test_deepep_v2_expands_in_decode(right, changes, expanded):
    assert is_expanded(build(right, changes)[0]) is expanded

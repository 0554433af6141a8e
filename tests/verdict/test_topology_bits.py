"""Two topologies of one model: bits part where something is wrong, or where a rounding differs."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from actors.driver import run_scenario
from actors.resolve import resolve
from moe.arithmetic import DEEP_GEMM_SM90
from moe.formats import GemmLayout, QuantRecipe, ScaleFormat, SharedExpertMode, Stage
from reports.verdict.canonical import CanonicalForward, NamedRows, canonical_forward
from reports.verdict.judge import Judge
from reports.verdict.topology_bits import declared_parting, first_parting
from tests.mutation.worlds import load

ONE_RANK = "parallel={world_size: 1, attention: {dp: 1}, moe: {ep: 1}}"
TWO_RANKS = "parallel={world_size: 2, attention: {dp: 1, tp: 2}, moe: {ep: 2}}"
FEWER = {
    "a2a": (ONE_RANK, "batch.tokens=[17]"),
    "tp": (ONE_RANK, "batch.tokens=[7]"),
    "slabs ll": (TWO_RANKS, "batch.tokens=[17]"),  # one rank may not send as many
}


@cache
def forward(world: str, *sets: str) -> CanonicalForward:
    loaded = load(world, sets=sets)
    (run,) = run_scenario(loaded).runs
    traces = [report.trace for report in run.reports]
    return canonical_forward(Judge(resolve(loaded).judged).subject(run.batch, traces))


def on_fewer_ranks(world: str) -> CanonicalForward:
    return forward(world, *FEWER[world])


def with_changed_bit(one: CanonicalForward, stage: Stage, tensor: str, row: int, column: int):
    rows = one.values[stage, tensor]
    values = rows.values.clone()
    values[row, column] += 1
    other = NamedRows(names=rows.names, traced=values, ranks=rows.ranks)
    changed = {**one.values, (stage, tensor): other}
    return CanonicalForward(layer=one.layer, values=changed)


@pytest.mark.parametrize("world", FEWER)
def test_a_forward_parts_from_itself_nowhere(world):
    assert first_parting(forward(world), forward(world)) is None


@pytest.mark.parametrize(
    ("world", "stage"), [("a2a", "combine"), ("tp", "tail"), ("slabs ll", None)]
)
def test_bits_part_behind_the_first_rounding_that_only_one_has(world, stage):
    """A shard's columns side by side are the whole row; low latency rounds no sum on its way."""
    parting = first_parting(forward(world), on_fewer_ranks(world))
    assert (parting and parting.stage) == stage


@pytest.mark.parametrize(
    ("world", "stage"), [("a2a", "post_permute"), ("tp", "gemm2"), ("slabs ll", None)]
)
def test_that_rounding_is_declared(world, stage):
    declared = declared_parting(forward(world).layer, on_fewer_ranks(world).layer)
    assert (declared and declared.stage) == stage


ROUTES = [(stage, name) for stage, name in forward("a2a").values if stage.position in range(4, 9)]


@pytest.mark.parametrize(("stage", "name"), ROUTES)
@pytest.mark.parametrize("side", [0, 1])
def test_a_changed_value_of_a_route_is_found_at_its_stage_token_and_slot(stage, name, side):
    """Row 20 of six slots a token."""
    pair = [forward("a2a"), on_fewer_ranks("a2a")]
    pair[side] = with_changed_bit(pair[side], stage, name, 20, 5)
    parting = first_parting(*pair)
    assert (parting.stage, parting.token, parting.slot, parting.column) == (stage, 3, 2, 5)
    assert parting.cells == 1


@pytest.mark.parametrize(
    ("stage", "name"), [(s, n) for s, n in forward("a2a").values if s in ("glue_in", "route")]
)
def test_a_changed_value_of_a_token_is_found_at_its_stage(stage, name):
    parting = first_parting(
        with_changed_bit(forward("a2a"), stage, name, 3, 1), on_fewer_ranks("a2a")
    )
    assert (parting.stage, parting.tensor, parting.token, parting.slot) == (stage, name, 3, None)


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({}, None),
        ({"wire_format": ScaleFormat.FP32}, "pre_permute"),
        ({"gemm_layout": GemmLayout.MASKED}, "activation"),
        ({"slot_experts": (1, 0, *range(2, 8))}, None),
        ({"slot_experts": (2, 1, 0, *range(3, 8))}, "post_permute"),
        ({"shared": SharedExpertMode.LOCAL}, "tail"),
    ],
    ids=["nothing", "wire", "layout", "order in a rank", "other rank", "shared expert"],
)
def test_each_rounding_point_is_declared_at_its_stage(change, stage):
    layer = forward("a2a").layer
    declared = declared_parting(layer, replace(layer, **change))
    assert (declared and declared.stage) == stage


def test_a_backend_that_promises_nothing_may_change_bits_from_gemm1_on():
    layer = forward("a2a").layer
    other = replace(layer, arithmetic=replace(layer.arithmetic, rows_stand_alone=False))
    assert declared_parting(layer, other).stage is Stage.GEMM1


@pytest.mark.parametrize(("alone", "stage"), [(True, Stage.GEMM2), (False, Stage.GEMM1)])
def test_shards_part_at_gemm1_where_columns_have_no_bits_of_their_own(alone, stage):
    arithmetic = replace(forward("tp").layer.arithmetic, columns_stand_alone=alone)
    sharded, whole = (
        replace(each.layer, arithmetic=arithmetic) for each in (forward("tp"), on_fewer_ranks("tp"))
    )
    assert (sharded.layout.moe_tp, whole.layout.moe_tp) == (2, 1)
    assert declared_parting(sharded, whole).stage is stage


def test_values_that_are_no_number_in_both_are_the_same():
    one = with_changed_bit(forward("a2a"), Stage.GLUE_OUT, "hidden_states", 0, 0)
    one.output[0, 0] = torch.nan
    assert first_parting(one, one) is None


@pytest.mark.parametrize(
    ("change", "stage", "reason"),
    [
        ({"recipe": QuantRecipe.MXFP8}, Stage.GEMM1, "expert weights are rounded otherwise: "),
        ({"arithmetic": DEEP_GEMM_SM90}, Stage.ROUTE, "their GEMM backends declare other"),
    ],
    ids=["recipe", "arithmetic"],
)
def test_other_weights_and_other_sums_are_declared(change, stage, reason):
    layer = forward("a2a").layer
    layer = replace(layer, recipe=QuantRecipe.FP8_PER_TENSOR)  # whose rows mxfp8 quantises alike
    there = replace(layer, **change)
    if "recipe" in change:
        assert layer.scales_of(Stage.PRE_PERMUTE, "rows.hidden_states") == there.scales_of(
            Stage.PRE_PERMUTE, "rows.hidden_states"
        )
    declared = declared_parting(layer, there)
    assert declared.stage is stage
    assert declared.reason.startswith(reason)

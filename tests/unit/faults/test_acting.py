"""Armed faults take hold on their rank, at their stage, and say whether they changed anything."""

from dataclasses import dataclass

import pytest
import torch

from moe.faults import (
    FAULTS,
    FaultKind,
    FaultTap,
    arm,
    blinded_checks,
    edit_plan,
    plan_edits,
    wrap_collectives,
)
from moe.formats import Stage
from moe.stages import TailOutput
from tests.unit.faults.handed_on import LAYERS, handed_on, let_loose
from tests.unit.faults.values import shared_output
from topology.loopback import LoopbackWorld

TOKENS = (4, 0, 2, 7)


@dataclass(frozen=True)
class Plan:
    routed_scaling_factor: float
    tail_scaling_factor: float = 1.0


def test_a_value_fault_acts_at_its_stage_on_its_rank_alone():
    armed = arm("rank_raises", {"rank": 1, "stage": "gemm2"}, TOKENS)
    others = FaultTap(0, 4, [armed])
    assert others(Stage.GEMM2, "value") == "value"
    tap = FaultTap(1, 4, [armed])
    assert tap(Stage.GEMM1, "value") == "value"
    with pytest.raises(RuntimeError, match="injected"):
        tap(Stage.GEMM2, "value")


@pytest.mark.parametrize(
    ("shared", "acted"), [(3.0, {"shared_expert_missing"}), (0.0, set()), (None, set())], ids=str
)
def test_a_value_fault_has_acted_when_a_bit_has_changed(shared, acted):
    tap = FaultTap(1, 4, [arm("shared_expert_missing", {"rank": 1}, TOKENS)])
    output = torch.ones(1, 1, dtype=torch.bfloat16)
    added = None if shared is None else shared_output(shared)
    tap(Stage.TAIL, TailOutput(shared=added, output=output))
    assert tap.acted == acted


PROCESS_FAULTS = {"rank_raises", "rank_dies", "rank_hangs"}
VALUE_FAULTS = [
    name
    for name, fault in FAULTS.items()
    if fault.kind is FaultKind.VALUE and name not in PROCESS_FAULTS
]
TILES = {Stage.GEMM1, Stage.GEMM2}
QUANTISED = {Stage.DISPATCH, Stage.PRE_PERMUTE, Stage.ACTIVATION}
ACTS_AT = {
    "gemm_tail_rows_dropped": TILES,
    "tile_spilled": TILES,
    "tile_of_next_block": TILES,
    "scales_in_wrong_layout": QUANTISED,
    "scale_inverted": QUANTISED,
    "scale_of_next_block": QUANTISED,
    "scale_of_next_row": QUANTISED,
    "scale_of_first_block": QUANTISED,
    "fp32_scale_unpacked_read": QUANTISED,
}
"""Fault with a parameter ``stage`` -> the stages whose values it knows."""


def test_faults_that_take_a_stage_are_all_listed():
    takes_stage = {name for name, fault in FAULTS.items() if "stage" in fault.params}
    assert takes_stage == ACTS_AT.keys() | PROCESS_FAULTS


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("fault", ACTS_AT)
def test_a_fault_acts_at_the_stages_whose_values_it_knows_and_is_void_elsewhere(fault, stage):
    _, has_acted = let_loose(fault, "deepep_v2 mxfp8", (5, 3), stage=str(stage))
    assert has_acted is (stage in ACTS_AT[fault])


IDLE = (0, 0)
ACTS_WITHOUT_ROWS = {"count_off_by_one"}
SENDS_A_DUMMY_ROW = {"deepep_v2", "deepep_v2 mxfp8"}


@pytest.mark.parametrize("fault", VALUE_FAULTS)
def test_a_fault_leaves_an_idle_rank_a_value_of_every_stage(fault):
    for layer in LAYERS:
        values, _ = let_loose(fault, layer, IDLE)
        kinds = {stage: type(value) for stage, value in handed_on(layer, IDLE).items()}
        assert {stage: type(value) for stage, value in values.items()} == kinds, layer


@pytest.mark.parametrize(
    "fault",
    [
        name
        for name in VALUE_FAULTS
        if FAULTS[name].stage is not Stage.WEIGHTS and name not in ACTS_WITHOUT_ROWS
    ],
)
def test_a_fault_of_rows_finds_none_on_an_idle_rank(fault):
    acted = {layer for layer in LAYERS if let_loose(fault, layer, IDLE)[1]}
    assert acted <= SENDS_A_DUMMY_ROW


DIVISORS = ("tile", "vector", "bound")
"""Parameters that are at least 1."""


@pytest.mark.parametrize("value", [0, 2**31 - 1], ids=["least", "largest"])
@pytest.mark.parametrize("fault", VALUE_FAULTS)
def test_a_fault_takes_numbers_of_any_size(fault, value):
    params = FAULTS[fault].params.items()
    numbers = {
        name: max(value, int(name in DIVISORS))
        for name, default in params
        if isinstance(default, int | float)
    }
    values, _ = let_loose(fault, "deepep_v2 mxfp8", (5, 3), **numbers)
    assert list(values) == list(Stage)


def test_a_plan_is_edited_on_the_faults_ranks_alone():
    armed = arm("scaling_factor_missing", {"rank": 2}, TOKENS)
    assert edit_plan(Plan(1.5), [armed], rank=2) == Plan(1.0)
    assert edit_plan(Plan(1.5), [armed], rank=1) == Plan(1.5)


@pytest.mark.parametrize(
    ("factor", "rank", "edited"),
    [(1.5, 2, {"scaling_factor_missing"}), (1.5, 1, set()), (1.0, 2, set())],
)
def test_a_plan_fault_has_acted_when_the_plan_is_another(factor, rank, edited):
    armed = arm("scaling_factor_missing", {"rank": 2}, TOKENS)
    assert plan_edits(Plan(factor), [armed], rank) == edited


def test_faults_of_other_kinds_leave_the_plan_alone():
    faults = [arm(name, {}, TOKENS) for name, f in FAULTS.items() if f.kind is not FaultKind.PLAN]
    plan = object()
    assert edit_plan(plan, faults, rank=2) is plan


def test_ranks_without_a_collective_fault_keep_their_own_verbs():
    def program(collectives):
        faults = [arm("partial_dropped", {"rank": 1}, TOKENS)]
        return wrap_collectives(collectives, faults, set()) is collectives

    assert LoopbackWorld(2).run(program) == [True, False]


def test_blinded_checks_are_named():
    faults = [
        arm("checker_blinded", {"check": check}, TOKENS) for check in ("band", "quantiser rule")
    ]
    assert blinded_checks([*faults, arm("tokens_swapped", {}, TOKENS)]) == {
        "band",
        "quantiser rule",
    }

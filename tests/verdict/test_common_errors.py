"""Clean stages in which many cells have one error in common: none of them is a finding.

A factor times a bf16 value lies within an fp32 roundoff of a boundary for two or three of the 128
mantissas, an exp vanishes beside 1, sums are cut off: such steps all go one way.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from moe.arithmetic import TENSOR_CORES, ArithmeticModel
from moe.formats import GatedActivation, Stage
from moe.golden import Stores
from reports.verdict.distribution import DISTRIBUTION, check_distribution
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from reports.verdict.stage_checks import StageChecks, product
from tests.verdict.clean_runs import CleanRun, run_clean

COLUMNS = 1024

MANY_ROWS = ("batch.tokens=[96, 64]", "model.overrides.n_shared_experts=0")
FACTOR = "model.overrides.routed_scaling_factor"
WITH_FACTORS = {
    "2.2 in the tail": (*MANY_ROWS, f"{FACTOR}=2.2"),
    "2.6 in the tail": (*MANY_ROWS, f"{FACTOR}=2.6"),
    "2.2 times one route of weight 1": (
        *MANY_ROWS,
        f"{FACTOR}=2.2",
        "moe.dispatcher=standard",
        "model.overrides.num_experts_per_tok=1",
    ),
    "2.025 times exact partials": (
        "platform=sm90",
        "batch.tokens=[96, 64]",
        f"{FACTOR}=2.025",
        "moe.dispatcher=standard",
        "moe.shared_experts=replicated",
        "inputs.modes=[exact]",
    ),
}


@cache
def clean_run(name: str) -> CleanRun:
    return run_clean(*WITH_FACTORS[name])


@pytest.mark.parametrize("name", WITH_FACTORS)
def test_a_factor_that_puts_many_cells_next_to_a_boundary_is_no_finding(name):
    assert clean_run(name).judged().deviations == []


@pytest.mark.parametrize("gain", [1.001, 0.999])
def test_a_gain_of_one_thousandth_behind_such_a_factor_is_found(gain):
    run = clean_run("2.2 in the tail")
    routed = run.tensor(Stage.COMBINE, 0, "routed").float()
    changed = run.changed(Stage.TAIL, 0, {"output": (routed * (2.2 * gain)).to(torch.bfloat16)})
    found = [one for one in run.judged(changed).deviations if one.stage is Stage.TAIL]
    assert {one.rank for one in found} == {0}


def checks_of(run: CleanRun, stage: Stage, rows: int, **facts) -> StageChecks:
    layer = replace(run.resolved.judged, **facts)
    return StageChecks(Ledger(), stage, layer, Rows.of_rank(0, rows))


@pytest.mark.parametrize("lowest", [-36.0, 15.0], ids=["of any sign", "far out"])
def test_gates_beside_which_exp_vanishes_are_no_finding(clean_ue8m0, lowest):
    generator = torch.Generator().manual_seed(2)
    gate = lowest + (25.0 - lowest) * torch.rand(256, 256, generator=generator)
    up = torch.randn(256, 256, generator=generator)
    gate_up = torch.cat([gate, up], dim=1).to(torch.bfloat16)
    gate, up = gate_up.float().chunk(2, dim=1)
    got = (gate / (1 + torch.exp(-gate)) * up).to(torch.bfloat16)
    checks = checks_of(clean_ue8m0, Stage.ACTIVATION, 256, activation=GatedActivation())
    checks.activation("activation", got, gate_up, Stores.PRODUCT)
    check_distribution(checks.ledger)
    assert checks.ledger.deviations == []


def operands() -> list[Tensor]:
    """[128, K] and [256, K] float64 values of bf16, all positive, so that sums only grow."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.rand(rows, COLUMNS, generator=generator).to(torch.bfloat16).double()
        for rows in (128, 256)
    ]


def cut_off(lhs: Tensor, weight: Tensor) -> Tensor:
    """[R, N] product, column by column; behind each the sum keeps 24 bits and loses the others."""
    total = torch.zeros(len(lhs), len(weight), dtype=torch.float64)
    for column in range(lhs.shape[1]):
        total.addr_(lhs[:, column], weight[:, column])
        total.view(torch.int64).bitwise_and_(-(1 << 53 - 24))
    return total


@pytest.mark.parametrize(
    ("arithmetic", "found"),
    [(TENSOR_CORES, set()), (ArithmeticModel(), {DISTRIBUTION})],
    ids=["declared", "declared to round"],
)
def test_sums_that_are_cut_off_lean_unless_they_are_declared_so(clean_ue8m0, arithmetic, found):
    lhs, weight = operands()
    got = cut_off(lhs, weight).to(torch.bfloat16)
    checks = checks_of(clean_ue8m0, Stage.GEMM1, 128, arithmetic=arithmetic)
    checks.gemm("gate_up", got, product(lhs, weight), COLUMNS)
    check_distribution(checks.ledger)
    assert {one.check for one in checks.ledger.deviations} == found

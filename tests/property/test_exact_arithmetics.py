"""Other orders, associations and accumulators change no certified cell."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from actors.driver import run_scenario
from actors.gemm import widths_of
from moe import grouped_gemm
from moe.quant import fp8
from reports.verdict.exact_compared import EXACT
from scenarios.loader import load_scenario

SETTINGS = (
    "run.runtime=loopback",
    "platform=sm90",
    "model.overrides.hidden_size=256",
    "model.overrides.moe_intermediate_size=256",
)


def backwards(out: Tensor, lhs: Tensor, rhs: Tensor) -> None:
    """Columns from last to first, one at a time, in fp32."""
    out.zero_()
    for column in reversed((lhs != 0).any(0).nonzero()[:, 0].tolist()):
        out += lhs[:, column, None] * rhs[:, column]


def truncated(out: Tensor, lhs: Tensor, rhs: Tensor) -> None:
    """14 bits, aligned to the largest term and cut, 32 products at a time."""
    total = torch.zeros(out.shape, dtype=torch.float64)
    for start in range(0, lhs.shape[1], 32):
        products = lhs[:, None, start : start + 32].double() * rhs[None, :, start : start + 32]
        largest = torch.maximum(products.abs().amax(-1), total.abs()).clamp_min(2.0**-100)
        place = torch.exp2(torch.floor(torch.log2(largest)) - 13)
        cut = torch.trunc(products / place[..., None]).sum(-1) + torch.trunc(total / place)
        total = cut * place
    out.copy_(total)


def scaled_in_two_steps(
    out: Tensor, lhs: Tensor, lhs_scale: Tensor, rhs: Tensor, rhs_scale: Tensor
) -> None:
    """Blocks from last to first, one scale after the other."""
    by_row = rhs_scale.repeat_interleave(128, dim=0)[: len(rhs)]
    out.zero_()
    for block in reversed(range(lhs_scale.shape[1])):
        part = slice(128 * block, 128 * (block + 1))
        out += lhs[:, part] @ rhs[:, part].t() * lhs_scale[:, block, None] * by_row[:, block]


def scaled_and_added_at_once(
    out: Tensor, lhs: Tensor, lhs_scale: Tensor, rhs: Tensor, rhs_scale: Tensor
) -> None:
    """A fused multiply-add: one rounding a block."""
    by_row = rhs_scale.repeat_interleave(128, dim=0)[: len(rhs)]
    out.zero_()
    for block in range(lhs_scale.shape[1]):
        part = slice(128 * block, 128 * (block + 1))
        scale = (lhs_scale[:, block, None] * by_row[:, block]).double()
        out.copy_(out.double() + (lhs[:, part].double() @ rhs[:, part].double().t()) * scale)


def off_by_two_places(rows: Tensor) -> Tensor:
    """Codes of a quantiser whose reciprocal is two places too large."""
    return ROUND(rows * (1 + 2 * 2.0**-23))


ROUND = fp8.round_to_e4m3

MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "columns backwards": (grouped_gemm, "_fill_product", backwards),
    "14 bits a block": (grouped_gemm, "_fill_product", truncated),
    "scales one by one": (grouped_gemm, "_fill_scaled_product", scaled_in_two_steps),
    "fused multiply-add": (grouped_gemm, "_fill_scaled_product", scaled_and_added_at_once),
    "reciprocal off by two places": (fp8, "round_to_e4m3", off_by_two_places),
}


@pytest.fixture(autouse=True)
def measured_anew():
    """A mutant's kernels are measured as its own, and leave nothing to the tests behind."""
    widths_of.cache_clear()
    yield
    widths_of.cache_clear()


NORMAL = ("moe.dispatcher=deepep_normal",)
SLABS = ("moe.dispatcher=deepep_ll", "batch.phase=decode")


@pytest.mark.parametrize(
    ("mutant", "layout"),
    [*((mutant, NORMAL) for mutant in MUTANTS), ("fused multiply-add", SLABS)],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_no_certified_cell_changes(mutant, layout, monkeypatch):
    scenario = load_scenario(
        "scenarios/smoke/ep2_dp.yaml",
        overrides=[*SETTINGS, "inputs.modes=[exact]", *layout],
    )
    monkeypatch.setattr(*MUTANTS[mutant])
    (run,) = run_scenario(scenario).runs
    facts = run.judgement.certificate
    assert facts.refusal is None
    assert [one for one in run.judgement.ledger.deviations if one.check == EXACT] == []
    differs = run.judgement.output.double() != run.judgement.same_recipe.output
    assert not bool((differs & facts.output_cells).any())


def test_without_a_certificate_such_mutants_change_bits(monkeypatch):
    """What the certificate is for: drawn inputs come out otherwise."""
    scenario = load_scenario("scenarios/smoke/ep2_dp.yaml", overrides=SETTINGS)
    (right,) = run_scenario(scenario).runs
    monkeypatch.setattr(*MUTANTS["14 bits a block"])
    (other,) = run_scenario(scenario).runs
    assert not torch.equal(right.judgement.output, other.judgement.output)

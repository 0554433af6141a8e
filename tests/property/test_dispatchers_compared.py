"""One model, one token list, one topology: all dispatchers and layouts give the same rows."""

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from actors.driver import run_scenario
from actors.resolve import resolve
from moe.arithmetic import BF16_ROUNDOFF
from moe.formats import Stage
from reports.verdict.decode import dequantized
from reports.verdict.format_views import view_of
from reports.verdict.subject import Subject
from scenarios.loader import LoadedScenario, load_scenario
from tests.property.golden_terms import terms_of

BASE = "scenarios/topologies/dp_ep_a2a.yaml"
SETTINGS = (
    "run.runtime=loopback",
    "inputs.modes=[random]",
    "model.overrides={hidden_size: 128, moe_intermediate_size: 512, n_routed_experts: 8}",
    "parallel.world_size=4",
    "parallel.attention={dp: 4}",
    "parallel.moe={ep: 4}",
    "batch.tokens=[9, 0, 4, 12]",
)
PATHS = {
    "standard-compact": ("standard", "compact", "extend"),
    "standard-masked": ("standard", "masked", "extend"),
    "deepep_normal": ("deepep_normal", "auto", "extend"),
    "deepep_ll": ("deepep_ll", "auto", "decode"),
    "mooncake": ("mooncake", "auto", "decode"),
    "nixl": ("nixl", "auto", "decode"),
    "deepep_v2-extend": ("deepep_v2", "auto", "extend"),
    "deepep_v2-decode": ("deepep_v2", "auto", "decode"),
    "deepep_v2-expanded-compact": ("deepep_v2", "compact", "decode"),
    "flashinfer-extend-compact": ("flashinfer", "compact", "extend"),
    "flashinfer-extend-masked": ("flashinfer", "masked", "extend"),
    "flashinfer-decode-compact": ("flashinfer", "compact", "decode"),
    "flashinfer-decode-masked": ("flashinfer", "masked", "decode"),
}
"""Dispatcher, layout, phase."""

IN_SLABS = (
    "standard-masked",
    "deepep_ll",
    "mooncake",
    "nixl",
    "deepep_v2-decode",
    "flashinfer-extend-masked",
    "flashinfer-decode-masked",
)
IN_SEGMENTS = tuple(name for name in PATHS if name not in IN_SLABS)
CLAMPS = pytest.mark.parametrize("limit", ["10.0", "null"], ids=["clamp", "no_clamp"])

ROUNDINGS = 4 + 4
"""bf16 stores on the longest way from expert rows to an output cell: a weighted route, a partial
for each of 4 ranks, the sum over the ranks, the shared expert's addition, the tail."""


def loaded(path: str, recipe: str, limit: str) -> LoadedScenario:
    dispatcher, layout, phase = PATHS[path]
    return load_scenario(
        BASE,
        overrides=[
            *SETTINGS,
            f"moe.dispatcher={dispatcher}",
            f"moe.layout={layout}",
            f"batch.phase={phase}",
            f"moe.recipe={recipe}",
            f"model.overrides.swiglu_limit={limit}",
            "allow_unsupported=true",
        ],
    )


@dataclass(frozen=True)
class Rows:
    """What a path gave, the routes token after token, slot after slot.

    output, topk_ids     [T, H], [T, K]
    terms                [T, H] sum of |terms| of each cell of the output
    activation, experts  [T * K, I] as the second GEMM read it, [T * K, H] int16
    """

    output: Tensor
    topk_ids: Tensor
    terms: Tensor
    activation: Tensor
    experts: Tensor


@cache
def rows_of(path: str, recipe: str, limit: str) -> Rows:
    scenario = loaded(path, recipe, limit)
    outcome = run_scenario(scenario, asks=False)
    assert outcome.result.verdict == "agree", outcome.result.summary
    (run,) = outcome.runs
    layer = resolve(scenario).judged
    traces = [report.trace for report in run.reports]
    subject = Subject(layer, view_of(layer), run.batch, traces)
    return Rows(
        output=run.judgement.output,
        topk_ids=run.judgement.topk_ids,
        terms=terms_of(layer, run),
        activation=of_routes(subject, Stage.ACTIVATION, "activation"),
        experts=of_routes(subject, Stage.GEMM2, "output").view(torch.int16),
    )


def of_routes(subject: Subject, stage: Stage, name: str) -> Tensor:
    """[T * K, C] one tensor of every route, token after token, slot after slot."""
    rows = subject.route_rows
    order = torch.argsort(rows.token * subject.layer.top_k + rows.slot)
    order = order[rows.token[order] >= 0]
    tensor = subject.route_tensor(stage, name)
    scale = subject.route_scale(stage, f"{name}_scale")
    return tensor[order] if scale is None else dequantized(tensor, scale)[order]


@pytest.mark.parametrize("path", PATHS)
def test_in_bf16_every_path_computes_the_same_expert_rows(path):
    """Masked and compact too: a row's bits depend on nothing but its token and its expert."""
    one = rows_of("standard-compact", "bf16", "10.0").experts
    assert torch.equal(rows_of(path, "bf16", "10.0").experts, one)


@pytest.mark.parametrize("path", ["standard-masked", "deepep_v2-decode", "deepep_v2-extend"])
def test_in_bf16_every_layout_does_so_without_a_clamp(path):
    one = rows_of("standard-compact", "bf16", "null").experts
    assert torch.equal(rows_of(path, "bf16", "null").experts, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("standard-compact", "standard-masked"),
        ("flashinfer-extend-compact", "flashinfer-extend-masked"),
        ("flashinfer-decode-compact", "flashinfer-decode-masked"),
        ("deepep_ll", "mooncake"),
        ("deepep_ll", "nixl"),
    ],
)
def test_in_bf16_these_paths_give_the_same_output_bits(one, other):
    assert torch.equal(
        rows_of(one, "bf16", "10.0").output,
        rows_of(other, "bf16", "10.0").output,
    )


@CLAMPS
@pytest.mark.parametrize("paths", [IN_SLABS, IN_SEGMENTS], ids=["masked", "compact"])
def test_in_fp8_paths_of_one_layout_compute_the_same_expert_rows(paths, limit):
    first = rows_of(paths[0], "fp8_block128", limit).experts
    for path in paths[1:]:
        assert torch.equal(rows_of(path, "fp8_block128", limit).experts, first), path


@pytest.mark.parametrize(("limit", "roundings"), [("10.0", 1), ("null", 2)])
def test_in_fp8_the_layouts_differ_by_the_stores_before_the_quantiser(limit, roundings):
    """With a clamp slabs are quantised from fp32; without one they are stored once more."""
    slabs, segments = (
        rows_of(path, "fp8_block128", limit).activation.double()
        for path in ("standard-masked", "standard-compact")
    )
    difference = (slabs - segments).abs()
    assert bool((difference > 0).any()), "they round alike: nothing was compared"
    largest = torch.maximum(slabs.abs(), segments.abs())
    assert bool((difference <= 1.01 * roundings * BF16_ROUNDOFF * largest).all())


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block128"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(*pair, id=" vs ".join(pair))
        for paths in (IN_SLABS, IN_SEGMENTS)
        for pair in itertools.combinations(paths, 2)
    ],
)
def test_two_paths_of_one_layout_differ_by_the_stores_between_them(one, other, recipe):
    first, second = (rows_of(path, recipe, "10.0") for path in (one, other))
    assert torch.equal(first.topk_ids, second.topk_ids)
    difference = (first.output.double() - second.output.double()).abs()
    worst = (difference / (2 * ROUNDINGS * BF16_ROUNDOFF * first.terms)).max()
    assert worst <= 1, f"at {float(worst):.2f} of what the stores explain"

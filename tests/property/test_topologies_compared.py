"""One model, one token list, one recipe: all topologies give the same rows, up to roundings."""

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from actors.driver import run_scenario
from actors.resolve import resolve
from actors.result_rows import ModeRun
from actors.world import LoopbackRanks
from moe.arithmetic import BF16_ROUNDOFF
from moe.batch import Batch
from moe.formats import Stage
from reports.verdict.format_views import view_of
from reports.verdict.goldens import golden_of
from reports.verdict.layer import JudgedLayer
from reports.verdict.subject import Subject
from reports.verdict.weights import expert_sizes, ideal_weights
from scenarios.batches import batch_of
from scenarios.inputs import deal
from scenarios.loader import LoadedScenario, load_scenario
from tests.property.golden_terms import terms_of
from topology.sync import PADDING

BASE = "scenarios/topologies/dp_ep_a2a.yaml"
NUM_TOKENS = 29
BY_EIGHT, BY_FOUR, BY_TWO = "[5, 0, 7, 1, 3, 8, 1, 4]", "[5, 8, 11, 5]", "[20, 9]"
STANDARD, DEEPEP = "moe.dispatcher=standard", "moe.dispatcher=deepep_normal"

TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "pure_tp": ("1,8,1", "1,8", STANDARD, f"batch.tokens=[{NUM_TOKENS}]"),
    "tp_ep_all_reduce": ("1,8,1", "8,1", STANDARD, f"batch.tokens=[{NUM_TOKENS}]"),
    "ep_tp_hybrid": ("1,8,1", "4,2", STANDARD, f"batch.tokens=[{NUM_TOKENS}]"),
    "dp_tp": ("4,2,1", "1,8", STANDARD, f"batch.tokens={BY_FOUR}"),
    "dp_ep_all_reduce": ("2,4,1", "8,1", STANDARD, f"batch.tokens={BY_TWO}"),
    "dp_ep_reduce_scatter_v": ("8,1,1", "8,1", STANDARD, f"batch.tokens={BY_EIGHT}"),
    "cp_gather": ("1,1,8", "8,1", STANDARD, f"batch.tokens=[{NUM_TOKENS}]"),
    "cp_a2a": ("1,1,8", "8,1", DEEPEP, f"batch.tokens=[{NUM_TOKENS}]"),
    "tp_ep_a2a": ("1,8,1", "8,1", DEEPEP, f"batch.tokens=[{NUM_TOKENS}]"),
    "dp_tp_ep_a2a": ("4,2,1", "8,1", DEEPEP, f"batch.tokens={BY_FOUR}"),
    "dp_ep_a2a": ("8,1,1", "8,1", DEEPEP, f"batch.tokens={BY_EIGHT}"),
    "shuffled": (
        "8,1,1",
        "8,1",
        DEEPEP,
        f"batch.tokens={BY_EIGHT}",
        "moe.placement=shuffled",
        "moe.redundant_experts=8",
    ),
}
"""Attention dp, tp, cp; MoE ep, tp; and what else the topology is."""

ROUNDINGS = 8 + 4
"""bf16 stores on the longest way from expert rows to an output cell: a partial for each of 8 ranks,
a shard's expert row, the shared expert's addition, the sum over the ranks, the tail."""


def loaded(topology: str, *settings: str) -> LoadedScenario:
    attention, moe, *more = TOPOLOGIES[topology]
    dp, tp, cp = attention.split(",")
    ep, moe_tp = moe.split(",")
    return load_scenario(
        BASE,
        overrides=[
            "run.runtime=loopback",
            "inputs.modes=[random]",
            "model.overrides={hidden_size: 128, moe_intermediate_size: 1024, n_routed_experts: 8}",
            f"parallel.attention={{dp: {dp}, tp: {tp}, cp: {cp}}}",
            f"parallel.moe={{ep: {ep}, tp: {moe_tp}}}",
            *more,
            *settings,
        ],
    )


def run_of(scenario: LoadedScenario) -> ModeRun:
    outcome = run_scenario(scenario, asks=False)
    assert outcome.result.verdict == "agree", outcome.result.summary
    (run,) = outcome.runs
    return run


@dataclass(frozen=True)
class Rows:
    """What a topology gave: output [T, H], choice [T, K], sum of |terms| of each cell [T, H]."""

    output: Tensor
    topk_ids: Tensor
    terms: Tensor


@cache
def rows_of(topology: str) -> Rows:
    scenario = loaded(topology, "moe.recipe=fp8_block128")
    run = run_of(scenario)
    terms = terms_of(resolve(scenario).judged, run)
    return Rows(run.judgement.output, run.judgement.topk_ids, terms)


@pytest.mark.parametrize(
    ("one", "other"),
    [pytest.param(*pair, id=" vs ".join(pair)) for pair in itertools.combinations(TOPOLOGIES, 2)],
)
def test_two_topologies_give_the_same_rows(one, other):
    first, second = rows_of(one), rows_of(other)
    assert torch.equal(first.topk_ids, second.topk_ids)
    difference = (first.output.double() - second.output.double()).abs()
    band = 2 * ROUNDINGS * BF16_ROUNDOFF * first.terms
    worst = (difference / band).max()
    assert worst <= 1, f"row {int((difference / band).amax(1).argmax())} at {worst:.2f} of its band"


def test_topologies_with_equal_roundings_are_bit_equal():
    """An all-to-all hands the same rows to the same ranks, whoever held them before."""
    outputs = [rows_of(name).output for name in ("dp_ep_a2a", "tp_ep_a2a", "cp_a2a")]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@cache
def expert_rows(topology: str, *settings: str) -> Tensor:
    """[T * K, H] bf16 of every route's expert output, token after token, slot after slot."""
    scenario = loaded(topology, *settings)
    layer, run = resolve(scenario).judged, run_of(scenario)
    traces = [report.trace for report in run.reports]
    subject = Subject(layer, view_of(layer), run.batch, traces)
    order = torch.argsort(subject.route_rows.token * layer.top_k + subject.route_rows.slot)
    return subject.route_tensor(Stage.GEMM2, "output")[order]


@pytest.mark.parametrize("topology", ["dp_ep_a2a", "dp_ep_reduce_scatter_v"])
@pytest.mark.parametrize("redundant", [0, 8])
def test_where_an_expert_stands_changes_no_bit_of_its_rows(topology, redundant):
    shuffled = expert_rows(topology, "moe.placement=shuffled", f"moe.redundant_experts={redundant}")
    contiguous = expert_rows(topology)
    assert torch.equal(contiguous.view(torch.int16), shuffled.view(torch.int16))


@pytest.mark.parametrize(
    ("topology", "mode"),
    [
        *((name, "auto") for name in TOPOLOGIES if name != "shuffled"),
        ("dp_tp", "replicated"),
        ("dp_tp", "local"),
        ("pure_tp", "replicated"),
        ("dp_ep_reduce_scatter_v", "replicated"),
        ("dp_ep_reduce_scatter_v", "local"),
        ("cp_gather", "replicated"),
    ],
)
def test_the_shared_expert_is_counted_once_however_it_is_spread(topology, mode):
    """Against the formula: a shared part counted twice or not at all is far outside."""
    settings = (f"moe.shared_experts={mode}", "model.overrides.n_shared_experts=2")
    scenario = loaded(topology, "moe.recipe=bf16", *settings)
    run = run_of(scenario)
    judgement = run.judgement
    error = (judgement.output.double() - judgement.ideal.output).norm()
    assert error < 0.02 * judgement.ideal.output.norm()
    shared = ideal_shared(resolve(scenario).judged, run.batch)
    assert shared.norm() > 0.2 * judgement.ideal.output.norm()


def ideal_shared(layer: JudgedLayer, batch: Batch) -> Tensor:
    """[T, H] float64 of the shared expert alone."""
    weights = ideal_weights(layer.weights, expert_sizes(layer))
    shared = golden_of(layer, batch, weights, rounding=False).shared
    assert shared is not None
    return shared


def output_of(scenario: LoadedScenario, order: Tensor) -> Tensor:
    """[T, H] bf16 output rows when the tokens enter in another order."""
    plan, batch = resolve(scenario).plan, batch_of(scenario, "random")
    reordered = Batch(hidden_states=batch.hidden_states[order])
    with LoopbackRanks(plan) as ranks:
        reports = ranks.forward(deal(reordered, plan.sync, plan.seed), timeout_s=60)
    rows = torch.empty_like(reordered.hidden_states)
    for tokens, report in zip(plan.sync.entry, reports, strict=True):
        at = torch.tensor(tokens, dtype=torch.int64)
        finished = report.trace[Stage.GLUE_OUT]["hidden_states"]
        rows[at[at != PADDING]] = finished[at != PADDING]
    return rows


WITHOUT_REPLICAS = [name for name in TOPOLOGIES if name != "shuffled"]
"""Which replica serves a route depends on the row, and with it where its partial is rounded."""


@pytest.mark.parametrize("topology", WITHOUT_REPLICAS)
def test_renaming_tokens_renames_their_rows(topology):
    """Every token changes its row, most their rank; no bit of what becomes of it does."""
    order = torch.arange(NUM_TOKENS).roll(11)
    renamed = output_of(loaded(topology), order)
    assert torch.equal(renamed, output_of(loaded(topology), torch.arange(NUM_TOKENS))[order])


@pytest.mark.parametrize("topology", ["dp_ep_a2a", "dp_ep_reduce_scatter_v"])
def test_how_tokens_are_dealt_to_the_groups_changes_no_bit(topology):
    dealt = [
        output_of(loaded(topology, f"batch.tokens={tokens}"), torch.arange(NUM_TOKENS))
        for tokens in (BY_EIGHT, "[0, 0, 0, 29, 0, 0, 0, 0]", "[4, 4, 4, 4, 4, 4, 4, 1]")
    ]
    assert torch.equal(dealt[0], dealt[1])
    assert torch.equal(dealt[0], dealt[2])

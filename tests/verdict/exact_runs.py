"""Clean runs on exact inputs, and what their exact check says of other traces."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from moe.trace import RankTrace
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.deviation import Deviation
from reports.verdict.exact_check import check_exact, compared_cells
from reports.verdict.exact_compared import EXACT
from reports.verdict.exact_sums import Conditions
from reports.verdict.golden_model import golden_model
from reports.verdict.judge import Judge
from reports.verdict.judgement import Judgement
from reports.verdict.ledger import Ledger
from reports.verdict.nominal_weights import NominalWeights
from reports.verdict.subject import Subject
from reports.verdict.weights import GoldenPreparation, expert_sizes, ideal_weights
from tests.verdict.clean_runs import FOUR_RANKS, CleanRun, run_clean

EXACT_RUNS: Mapping[str, tuple[str, ...]] = {
    "ue8m0": ("platform=sm100", *FOUR_RANKS),
    "fp32": ("platform=sm90", "model.overrides.hidden_size=512", "batch.tokens=[7, 5]"),
    "bf16": ("moe.recipe=bf16", *FOUR_RANKS),
    "slabs": ("moe.dispatcher=deepep_ll", "batch.phase=decode", *FOUR_RANKS),
    "partials": ("moe.dispatcher=standard", "moe.shared_experts=replicated", *FOUR_RANKS),
    "routes": ("moe.dispatcher=deepep_v2", "batch.phase=decode", *FOUR_RANKS),
}


@cache
def exact_run(name: str) -> CleanRun:
    return run_clean("inputs.modes=[exact]", *EXACT_RUNS[name])


@cache
def clean_judgement(name: str) -> Judgement:
    return judged(exact_run(name), exact_run(name).traces)


def judged(run: CleanRun, traces: Sequence[RankTrace]) -> Judgement:
    return run.judge.judge(run.batch, traces, run.calls)


@cache
def certified(name: str) -> tuple[CertifiedLayer, CertifiedSums]:
    """Computed from the clean run's routes alone."""
    run, golden = exact_run(name), clean_judgement(name).same_recipe
    layer, model = run.resolved.judged, golden_model(run.resolved.judged)
    preparation = GoldenPreparation(
        layer.weights, layer.recipe, layer.scale_format, expert_sizes(layer)
    )
    weights = NominalWeights(
        ideal_weights(layer.weights, expert_sizes(layer)), preparation.weights(), layer.scale_format
    )
    stages = CertifiedLayer(
        layer, model, weights, run.batch.hidden_states, golden.topk_ids, Conditions()
    )
    ep_ranks = golden.topk_ids // (layer.num_experts // layer.layout.ep)
    return stages, CertifiedSums(stages, model, golden.topk_weights, ep_ranks)


def compared(
    name: str, traces: Sequence[RankTrace], known: Sequence[Deviation] = ()
) -> list[Deviation]:
    """What the exact check says of other traces of a run, of which something is known already."""
    run, ledger = exact_run(name), Ledger(deviations=[*known])
    subject = Subject(run.resolved.judged, run.view, run.batch, traces)
    check_exact(subject, compared_cells(subject, *certified(name), ledger), ledger)
    return ledger.deviations[len(known) :]


def exact_deviations(judgement: Judgement) -> list[Deviation]:
    return [one for one in judgement.ledger.deviations if one.check == EXACT]


def asked_of(run: CleanRun, **facts: object) -> Judgement:
    """The verdict where other facts of the layer hold."""
    layer = replace(run.resolved.judged, **facts)
    return Judge(layer).judge(run.batch, run.traces, run.calls)

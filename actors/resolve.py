"""From a checked scenario to plans: every ``auto`` resolved, with the reason it was."""

from dataclasses import dataclass
from pathlib import Path

import torch

from actors.build import placement
from actors.plan import LayerPlan
from moe.dispatch.deepep_normal import COLLECTIVES
from moe.faults import ArmedFault, UnknownFaultError, arm
from moe.formats import Platform, QuantRecipe, RunnerBackend, ScaleFormat
from moe.grouped_gemm import TorchGemm
from moe.routing import RoutingRule
from moe.weights import WeightSource
from reports.verdict.subject import JudgedLayer
from scenarios.checkpoints import open_checkpoint
from scenarios.errors import Problem, ScenarioError
from scenarios.inputs import SyntheticWeights
from scenarios.loader import LoadedScenario
from scenarios.support import unsupported_reasons
from topology.layout import ParallelLayout

EXPERT_ROW_ALIGNMENT = 128
RULES = "sglang-0.5.21"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What an axis of ``backends`` resolved to, and why."""

    name: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScenario:
    """A scenario ready to run.

    plan      for the ranks
    judged    the same facts for the verdict
    faults    what is injected
    backends  axis -> choice
    """

    plan: LayerPlan
    judged: JudgedLayer
    faults: tuple[ArmedFault, ...]
    backends: dict[str, Choice]


def reasons_not_to_run(loaded: LoadedScenario) -> list[str]:
    """Why this version or machine does not run a scenario that is otherwise right."""
    reasons = list(unsupported_reasons(loaded.scenario, loaded.model))
    if loaded.scenario.run.runtime == "loopback":
        reasons += [
            f"fault {fault.name} ends or stops a process; ranks of loopback share one, use ray"
            for fault in arm_faults(loaded)
            if fault.fault.needs_process
        ]
    return reasons


def arm_faults(loaded: LoadedScenario) -> tuple[ArmedFault, ...]:
    """The scenario's faults with parameters and ranks settled.

    Raises:
        ScenarioError: names or parameters that do not exist.
    """
    armed, problems = [], []
    for fault in loaded.faults:
        try:
            armed.append(arm(fault.name, fault.params, loaded.scenario.batch.tokens))
        except UnknownFaultError as error:
            problems.append(Problem("inject", str(error)))
    if problems:
        raise ScenarioError(str(loaded.path), problems)
    return tuple(armed)


def resolve(loaded: LoadedScenario) -> ResolvedScenario:
    """Settle everything a run needs.

    Args:
        loaded: a scenario for which ``reasons_not_to_run`` is empty.

    Raises:
        ScenarioError: see ``arm_faults``.
        CheckpointError: the weights file does not fit the model.
    """
    plan = _plan(loaded)
    return ResolvedScenario(
        plan=plan,
        judged=_judged(plan, loaded.model.hidden_size),
        faults=arm_faults(loaded),
        backends=_backends(loaded),
    )


def _plan(loaded: LoadedScenario) -> LayerPlan:
    scenario, model = loaded.scenario, loaded.model
    parallel = scenario.parallel
    return LayerPlan(
        layout=ParallelLayout(
            attn_dp=parallel.attention.dp,
            attn_tp=parallel.attention.tp,
            cp=parallel.attention.cp,
            ep=parallel.moe.ep,
            moe_tp=parallel.moe.tp,
        ),
        tokens=scenario.batch.tokens,
        num_experts=model.n_routed_experts,
        routing=RoutingRule(
            top_k=model.num_experts_per_tok,
            scoring_func=model.scoring_func,
            renormalize=model.norm_topk_prob,
        ),
        dispatch_format=scenario.moe.dispatcher,
        runner=RunnerBackend.DEEP_GEMM,
        recipe=scenario.moe.recipe,
        scale_format=scale_format(scenario.moe.recipe, scenario.platform),
        row_alignment=EXPERT_ROW_ALIGNMENT,
        swiglu_limit=model.swiglu_limit,
        routed_scaling_factor=model.routed_scaling_factor,
        weights=_weights(loaded),
        seed=scenario.inputs.seed,
    )


def scale_format(recipe: QuantRecipe, platform: Platform) -> ScaleFormat:
    """How scales are stored: fp32 on SM90, packed powers of two on Blackwell.

    Source: SGLang 0.5.21, DEEPGEMM_SCALE_UE8M0.
    """
    if recipe is QuantRecipe.BF16:
        return ScaleFormat.NONE
    return ScaleFormat.FP32 if platform is Platform.SM90 else ScaleFormat.UE8M0


def _weights(loaded: LoadedScenario) -> WeightSource:
    scenario, model = loaded.scenario, loaded.model
    if scenario.model.weights.kind == "safetensors":
        return open_checkpoint(scenario.model.weights, model, scenario.moe.recipe)
    return SyntheticWeights(
        seed=scenario.inputs.seed,
        hidden_size=model.hidden_size,
        intermediate_size=model.moe_intermediate_size,
        shared_intermediate_size=model.shared_intermediate_size,
        num_experts=model.n_routed_experts,
        correction_bias=model.correction_bias,
        recipe=scenario.moe.recipe,
    )


def _judged(plan: LayerPlan, hidden_size: int) -> JudgedLayer:
    where = placement(plan)
    ranks = plan.layout.world
    return JudgedLayer(
        tokens=plan.tokens,
        hidden_size=hidden_size,
        top_k=plan.routing.top_k,
        renormalize=plan.routing.renormalize,
        routed_scaling_factor=plan.routed_scaling_factor,
        swiglu_limit=plan.swiglu_limit,
        recipe=plan.recipe,
        scale_format=plan.scale_format,
        row_alignment=plan.row_alignment,
        expert_rank=where.ep_rank_of_expert(),
        local_experts=tuple(where.local_experts(rank) for rank in ranks),
        groups=tuple(plan.layout.ep_group(rank) for rank in ranks),
        collectives=COLLECTIVES,
        arithmetic=TorchGemm().arithmetic(plan.scale_format),
        weights=plan.weights,
    )


def _backends(loaded: LoadedScenario) -> dict[str, Choice]:
    scenario = loaded.scenario
    moe, runtime = scenario.moe, scenario.run.runtime
    transport = {"ray": "gloo", "loopback": "loopback"}[runtime]
    asked = scenario.run.backends
    return {
        "gemm": _choice("torch", asked.gemm, "the reference GEMM; no GPU takes part"),
        "transport": _choice(
            transport,
            asked.transport,
            f"runtime {runtime} moves bytes with it; {moe.dispatcher} is emulated over it",
        ),
        "kernels": _choice("torch", asked.kernels, "permutes and quantisers in torch"),
        "runner": _choice("deep_gemm", moe.runner, f"{moe.dispatcher} runs with it", RULES),
        "layout": _choice(
            "compact", moe.layout, f"{moe.dispatcher} hands over expert segments end to end", RULES
        ),
        "shared_experts": _choice(
            "replicated", moe.shared_experts, "whole on every rank beside an all-to-all", RULES
        ),
        "device": _choice("cpu", scenario.run.device, "no GPU backend in this version"),
    }


def _choice(name: str, asked: str, why: str, version: str = torch.__version__) -> Choice:
    reason = f"auto: {why}" if asked == "auto" else "named in the scenario"
    return Choice(name=name, version=version, reason=reason)


def input_path(loaded: LoadedScenario) -> Path:
    """File of mode ``file``."""
    path = loaded.scenario.inputs.path
    assert path is not None, "the schema demands a path with mode file"
    return Path(path)

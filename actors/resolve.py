"""From a checked scenario to plans: every ``auto`` resolved, with the reason it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from actors.plan import LayerPlan
from actors.planning import judged_layer, plan_of, shared_mode
from moe.faults import ArmedFault, UnknownFaultError, arm
from moe.formats import DispatchFormat, QuantRecipe, SharedExpertMode
from reports.verdict.layer import JudgedLayer
from scenarios.errors import Problem, ScenarioError
from scenarios.layouts import layout_choice
from scenarios.loader import LoadedScenario
from scenarios.parallel import sync_of
from scenarios.support import unsupported_reasons
from topology.sync import Gather, Padding, Reducer, Return

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
    scenario = loaded.scenario
    groups = scenario.batch.tokens
    ranks_per_group = scenario.parallel.world_size // max(len(groups), 1)
    tokens = [count for count in groups for _ in range(ranks_per_group)]
    for fault in loaded.faults:
        try:
            armed.append(arm(fault.name, fault.params, tokens))
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
    plan = plan_of(loaded)
    return ResolvedScenario(
        plan=plan,
        judged=judged_layer(plan, loaded),
        faults=arm_faults(loaded),
        backends=_backends(loaded),
    )


def _backends(loaded: LoadedScenario) -> dict[str, Choice]:
    scenario = loaded.scenario
    moe, runtime = scenario.moe, scenario.run.runtime
    layout = layout_choice(scenario, loaded.model)
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
        "runner": _choice("deep_gemm", moe.runner, _runner_reason(loaded), RULES),
        "layout": _choice(layout.layout, moe.layout, layout.reason, RULES),
        "shared_experts": _choice(
            shared_mode(loaded) or "none", moe.shared_experts, _shared_reason(loaded), RULES
        ),
        **_glue(loaded),
        "device": _choice("cpu", scenario.run.device, "no GPU backend in this version"),
    }


def _glue(loaded: LoadedScenario) -> dict[str, Choice]:
    """How rows come together and return, and who sums over the ranks."""
    moe, sync = loaded.scenario.moe, sync_of(loaded.scenario)
    slots = f"slots of {', '.join(map(str, sync.slots))} rows" if sync.slots else "own rows"
    owners = {
        Reducer.COMBINE: "combine adds what comes back from the all-to-all",
        Reducer.TAIL: "the tail all-reduces the ranks' partial results",
        Reducer.GLUE_OUT: "the scatter that returns the rows sums them",
    }
    wire = ""
    if moe.switches.dp_gather_fp8 and sync.gather is not Gather.ALL_GATHER_V:
        wire = "; dp_gather_fp8 acts on all_gather_v alone"
    returning = str(sync.returning)
    if sync.reducer is Reducer.TAIL and sync.returning is Return.NONE:
        returning = "all_reduce"
    return {
        "gather": _choice(sync.gather, "auto", f"the layer works on {slots}{wire}", RULES),
        "padding": _choice(
            sync.padding,
            loaded.scenario.batch.padding,
            _padding_reason(loaded, sync.padding),
            RULES,
        ),
        "reduce": _choice(returning, moe.reduce, owners[sync.reducer], RULES),
    }


def _padding_reason(loaded: LoadedScenario, padding: Padding) -> str:
    moe = loaded.scenario.moe
    forces = moe.switches.deepep_v2_force_max_len and moe.dispatcher is DispatchFormat.DEEPEP_V2
    if padding is Padding.MAX_LEN and forces:
        return "every slot as long as the longest, by switch deepep_v2_force_max_len"
    return {
        Padding.NONE: "one attention-DP group has nothing to pad to",
        Padding.SUM_LEN: "prefill, or slots of which less than half would be filled",
        Padding.MAX_LEN: "decode with slots that are filled by half or more",
    }[padding]


_AUTO_TAKES: Final[Mapping[tuple[DispatchFormat, bool], str]] = MappingProxyType(
    {
        (DispatchFormat.STANDARD, False): "triton, or flashinfer_mxfp4 for fp4 experts",
        (DispatchFormat.STANDARD, True): "triton",
        (DispatchFormat.FLASHINFER, False): "cutlass, cutedsl or trtllm",
        (DispatchFormat.FLASHINFER, True): "cutlass or trtllm",
        (DispatchFormat.MOONCAKE, False): "deep_gemm",
        (DispatchFormat.MOONCAKE, True): "triton",
        (DispatchFormat.NIXL, False): "deep_gemm",
        (DispatchFormat.NIXL, True): "triton",
        **{
            (dispatcher, bf16): "deep_gemm"
            for dispatcher in (
                DispatchFormat.DEEPEP_NORMAL,
                DispatchFormat.DEEPEP_LL,
                DispatchFormat.DEEPEP_V2,
            )
            for bf16 in (False, True)
        },
    }
)
"""(dispatcher, bf16 experts) -> what SGLang's own ``auto`` takes.

Source: SGLang 0.5.21, fp8.py::is_deepgemm_moe_runner_backend_enabled; server_args.py (a2a).
"""


def _runner_reason(loaded: LoadedScenario) -> str:
    moe = loaded.scenario.moe
    other = _AUTO_TAKES.get((moe.dispatcher, moe.recipe is QuantRecipe.BF16))
    if other == "deep_gemm":
        return f"SGLang's own auto takes it beside {moe.dispatcher}"
    if other is None:
        return "the only runner modelled"
    return (
        f"the only runner modelled; SGLang's auto would take another here ({other}): serve with "
        "--moe-runner-backend deep_gemm to get what is judged"
    )


def _shared_reason(loaded: LoadedScenario) -> str:
    if not loaded.model.n_shared_experts:
        return "the model has none"
    if loaded.scenario.moe.dispatcher is not DispatchFormat.STANDARD:
        return "whole on every rank beside an all-to-all"
    return {
        SharedExpertMode.TP_SHARDED: "one shard a rank, summed with the routed part",
        SharedExpertMode.REPLICATED: "whole on every rank, by switch shared_expert_tp1",
        SharedExpertMode.LOCAL: "on own rows, by switch dp_shared_expert_local",
        None: "",
    }[shared_mode(loaded)]


def _choice(name: str, asked: str, why: str, version: str = torch.__version__) -> Choice:
    reason = f"auto: {why}" if asked == "auto" else "named in the scenario"
    return Choice(name=name, version=version, reason=reason)

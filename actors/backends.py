"""What every ``auto`` of a scenario became, with the reason."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from actors.machine import Choice, device_of, gemm_of, kernels_of, transport_of
from actors.planning import shared_mode
from moe.formats import DispatchFormat, Phase, QuantRecipe, SharedExpertMode
from scenarios.layouts import is_expanded, layout_choice
from scenarios.loader import LoadedScenario
from scenarios.parallel import sync_of
from scenarios.rules.dispatch import dispatch_capacity
from scenarios.schema import MoeSpec
from topology.sync import Gather, Padding, Reducer, Return, SyncPlan

RULES = "sglang-0.5.21"


def backends_of(loaded: LoadedScenario) -> dict[str, Choice]:
    """Axis -> choice, of a scenario that runs."""
    scenario = loaded.scenario
    moe, runtime = scenario.moe, scenario.run.runtime
    layout = layout_choice(scenario, loaded.model)
    transport = transport_of(scenario)
    asked = scenario.run.backends
    return {
        "gemm": gemm_of(loaded),
        "transport": _choice(
            transport, asked.transport, f"runtime {runtime} moves bytes with it; {_rides(moe)}"
        ),
        "kernels": kernels_of(loaded),
        "runner": _choice("deep_gemm", moe.runner, _runner_reason(loaded), RULES),
        "layout": _choice(layout.layout, moe.layout, layout.reason, RULES),
        "expanded": _choice(
            str(is_expanded(scenario)).lower(), moe.expanded, _expanded_reason(loaded), RULES
        ),
        "capacity": _capacity(loaded),
        "shared_experts": _choice(
            shared_mode(loaded) or "none", moe.shared_experts, _shared_reason(loaded), RULES
        ),
        **_glue(loaded),
        "device": device_of(scenario),
    }


def _rides(moe: MoeSpec) -> str:
    if moe.dispatcher is DispatchFormat.STANDARD:
        return "standard exchanges nothing, sums and gathers between ranks go over it"
    return f"{moe.dispatcher} is emulated over it"


def _expanded_reason(loaded: LoadedScenario) -> str:
    moe, phase = loaded.scenario.moe, loaded.scenario.batch.phase
    if moe.dispatcher is not DispatchFormat.DEEPEP_V2:
        return "only deepep_v2 expands"
    return f"deepep_v2 expands in decode alone, this is {phase}"


def _capacity(loaded: LoadedScenario) -> Choice:
    """Rows that a rank may send in one dispatch, and who says so."""
    dispatcher = loaded.scenario.moe.dispatcher
    most = dispatch_capacity(loaded.scenario)
    if most is None:
        reason = f"auto: {dispatcher} has no limit in {loaded.scenario.batch.phase}"
        return Choice(name="none", version=RULES, reason=reason)
    named = loaded.scenario.moe.switches.max_dispatch_tokens_per_rank is not None
    asked = str(most) if named else "auto"
    return _choice(str(most), asked, f"rows a rank may send, {dispatcher}'s default", RULES)


def _glue(loaded: LoadedScenario) -> dict[str, Choice]:
    """How rows come together and return, and who sums over the ranks."""
    scenario, sync = loaded.scenario, sync_of(loaded.scenario)
    asked, padding = scenario.batch.padding, _padding_reason(loaded, sync.padding)
    returning = str(sync.returning)
    if sync.reducer is Reducer.TAIL and sync.returning is Return.NONE:
        returning = "all_reduce"
    return {
        "gather": _choice(sync.gather, "auto", _gather_reason(loaded, sync), RULES),
        "padding": _choice(sync.padding, asked, padding, RULES),
        "reduce": _choice(returning, scenario.moe.reduce, _reduce_reason(sync), RULES),
    }


def _gather_reason(loaded: LoadedScenario, sync: SyncPlan) -> str:
    """Which rows the layer works on; a wire that does not act here."""
    rows = "own rows"
    if sync.gather is Gather.TENSOR_SPLIT:
        rows = "a chunk of own rows, one for each attention-TP rank"
    if sync.slots:
        rows = f"slots of {', '.join(map(str, sync.slots))} rows"
    idle = loaded.scenario.moe.switches.dp_gather_fp8 and sync.gather is not Gather.ALL_GATHER_V
    wire = "; dp_gather_fp8 acts on all_gather_v alone" if idle else ""
    return f"the layer works on {rows}{wire}"


def _reduce_reason(sync: SyncPlan) -> str:
    """Who adds the ranks' partial results, and how rows return, which is what the axis names."""
    if sync.reducer is Reducer.GLUE_OUT:
        return "the scatter that returns the rows sums them"
    if sync.reducer is Reducer.TAIL:
        cut = ", then each rank cuts out its slot" if sync.returning is Return.DP_SCATTER else ""
        return f"the tail all-reduces the ranks' partial results{cut}"
    how = "rows are with their owners then"
    if sync.returning is Return.ALL_GATHER:
        how = "behind the tail attention-TP ranks gather their chunks"
    return f"combine adds the ranks' partial results; {how}"


def _padding_reason(loaded: LoadedScenario, padding: Padding) -> str:
    moe, phase = loaded.scenario.moe, loaded.scenario.batch.phase
    forces = moe.switches.deepep_v2_force_max_len and moe.dispatcher is DispatchFormat.DEEPEP_V2
    if padding is Padding.NONE:
        return "one attention-DP group has nothing to pad to"
    if padding is Padding.MAX_LEN:
        because = "by switch deepep_v2_force_max_len"
        if not forces:
            because = "in decode with at least half of such slots filled"
        return f"every slot is as long as the longest, {because}"
    because = "in prefill"
    if phase is Phase.DECODE:
        because = "in decode with less than half of equal slots filled"
    return f"each slot is as long as its own group, {because}"


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


def _choice(name: str, asked: str | bool, why: str, version: str = torch.__version__) -> Choice:
    reason = f"auto: {why}" if asked == "auto" else "named in the scenario"
    return Choice(name=name, version=version, reason=reason)

"""What a reader has to know beside a verdict: rules modelled otherwise, idle switches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from actors.plan import LayerPlan
from actors.planning import plan_of
from moe.formats import (
    ActivationKind,
    DispatchFormat,
    GemmLayout,
    Platform,
    QuantRecipe,
    ScaleFormat,
)
from moe.platforms import PLATFORMS
from scenarios.layouts import layout_choice, padded_sizes
from scenarios.loader import LoadedScenario
from scenarios.models import MoeModel
from scenarios.schema import SwitchesSpec
from topology.sync import Gather, Padding

RANKS_OF_A_NODE: Final = 8
_ADDS_IN_STEPS: Final = (DispatchFormat.DEEPEP_NORMAL, DispatchFormat.DEEPEP_V2)
"""Dispatchers whose combine adds the ranks of a node first where there are several nodes."""

_NOTES_OF: Final[Mapping[Platform, str]] = MappingProxyType(
    {
        Platform.SM120: (
            "fp8 weights are quantised again with power-of-two scales, as SGLang 0.5.21 does on "
            "SM121; on SM120 itself it keeps their fp32 scales, whose cast to powers of two would "
            "inflate values or trap (by reading of its source): not modelled"
        ),
    }
)
"""Where one platform stands for a family, what its other member does."""

_SITU_SCALES: Final = (
    "a situ's scales are rounded up to powers of two before they quantise it; in the compact "
    "layout SGLang 0.5.21 rounds them up after it quantised: they are 1.44 times too large on "
    "average and 2 times at most, the relative error is 0.52 instead of 0.026 (measured with its "
    "released kernel on normal gate and up)"
)


def notes_of(loaded: LoadedScenario) -> list[str]:
    """Where the rules modelled are the reference's and not SGLang 0.5.21's as written."""
    return [
        *_of_model(loaded.model),
        *_of_padding(loaded),
        *_of_bf16_experts(loaded),
        *_of_the_compact_layout(loaded),
        *_of_nodes(loaded),
        *_of_platform(loaded),
    ]


def _of_model(model: MoeModel) -> Iterator[str]:
    """What of the published layer is left out."""
    if model.outer_hidden_size is not None:
        yield (
            f"a latent MoE: router and routed experts work in its latent width {model.hidden_size} "
            f"here; the projections from and to the model's {model.outer_hidden_size}, shared "
            "experts of that width and a router that reads it are not modelled"
        )
    if model.has_biases:
        yield (
            "the biases of the model's router and experts are left out; the DeepGEMM runner of "
            "SGLang 0.5.21 adds none (by reading of its source)"
        )


def _of_padding(loaded: LoadedScenario) -> Iterator[str]:
    """Sizes that the experts work with where they are not the model's."""
    model = loaded.model
    padded = padded_sizes(model, loaded.scenario.moe.recipe)
    if padded != (model.hidden_size, model.moe_intermediate_size):
        yield (
            f"experts are padded with zeros from {model.hidden_size} x "
            f"{model.moe_intermediate_size} to {padded[0]} x {padded[1]}; no padded column returns"
        )


def _of_bf16_experts(loaded: LoadedScenario) -> Iterator[str]:
    """Upstream's bf16 experts know no limit, no alpha and no situ."""
    kind, limit = loaded.model.activation.kind, loaded.model.activation.limit
    if loaded.scenario.moe.recipe is not QuantRecipe.BF16:
        return
    if kind is not ActivationKind.SILU:
        yield _plain_silu(kind, "bf16 experts")
    elif limit is not None:
        yield (
            f"experts clamp at {limit:g}, as the model says; the bf16 experts of SGLang 0.5.21 do "
            "not (by reading of its source)"
        )


def _of_the_compact_layout(loaded: LoadedScenario) -> Iterator[str]:
    """Upstream's quantised experts know no alpha there, and quantise a situ as nowhere else."""
    scenario, kind = loaded.scenario, loaded.model.activation.kind
    scales = PLATFORMS[scenario.platform].scale_format(scenario.moe.recipe)
    is_compact = layout_choice(scenario, loaded.model).layout is GemmLayout.CONTIG
    if scales is ScaleFormat.NONE or not is_compact:
        return
    if kind is ActivationKind.OAI_SWIGLU:
        yield _plain_silu(kind, "the compact layout")
    elif kind is ActivationKind.SITU and scales is ScaleFormat.UE8M0:
        yield _SITU_SCALES


def _plain_silu(kind: ActivationKind, where: str) -> str:
    return (
        f"experts compute {kind}, as the model says; in {where} SGLang 0.5.21 computes a plain "
        "silu(g) * u (by reading of its source)"
    )


def _of_nodes(loaded: LoadedScenario) -> Iterator[str]:
    scenario = loaded.scenario
    if scenario.moe.dispatcher in _ADDS_IN_STEPS and scenario.parallel.moe.ep > RANKS_OF_A_NODE:
        yield (
            "combine adds all ranks as on one node; between nodes DeepEP adds in steps, with more "
            "roundings"
        )


def _of_platform(loaded: LoadedScenario) -> Iterator[str]:
    moe, platform = loaded.scenario.moe, PLATFORMS[loaded.scenario.platform]
    scales = platform.scale_format(moe.recipe)
    if scales is ScaleFormat.NONE:
        return
    if platform.name in _NOTES_OF:
        yield _NOTES_OF[platform.name]
    codes = moe.dispatcher.is_low_latency and not moe.switches.deepep_bf16_dispatch
    if codes and platform.low_latency_scales is not scales:
        yield (
            f"the wire of {moe.dispatcher} has {platform.low_latency_scales} scales on "
            f"{platform.name}, the GEMMs read {scales}: rows are quantised again in front of them, "
            "where SGLang 0.5.21 rounds the scales up and keeps the codes, so that values grow (by "
            "reading of its source)"
        )


_ACTS: Final[Mapping[str, Callable[[LayerPlan], bool]]] = MappingProxyType(
    {
        "gathers_fp8": lambda plan: plan.sync.gather is Gather.ALL_GATHER_V,
        "bf16_wire": lambda plan: plan.scale_format is not ScaleFormat.NONE,
        "caps_slabs": lambda plan: (
            plan.dispatch_format.folds_scaling_factor and plan.gemm_layout is GemmLayout.MASKED
        ),
        "zeroes_padding": lambda plan: (
            plan.gemm_layout is GemmLayout.CONTIG
            and not plan.wide_segments
            and (
                plan.scale_format is not ScaleFormat.NONE
                or not plan.dispatch_format.folds_scaling_factor
            )
        ),
        "masks_slots": lambda plan: (
            plan.dispatch_format is DispatchFormat.STANDARD and plan.sync.padding is Padding.MAX_LEN
        ),
    }
)
"""Flag of a plan -> where it acts; every other field of a plan acts wherever it differs."""


def idle_switches(loaded: LoadedScenario, plan: LayerPlan) -> list[str]:
    """A note for each switch of the scenario without which the plan would come to the same.

    Args:
        loaded: a scenario that runs.
        plan: its plan.
    """
    here = _acting(plan)
    return [
        f"moe.switches.{name} changes nothing here"
        for name, default in SwitchesSpec()
        if getattr(loaded.scenario.moe.switches, name) != default
        and _acting(plan_of(_with_switch(loaded, name, default))) == here
    ]


def _acting(plan: LayerPlan) -> LayerPlan:
    """The plan with the flags off that have nothing to act on."""
    flags: dict[str, Any] = {
        name: getattr(plan, name) and acts(plan) for name, acts in _ACTS.items()
    }
    return replace(plan, **flags)


def _with_switch(loaded: LoadedScenario, name: str, value: Any) -> LoadedScenario:  # noqa: ANN401
    """The same scenario with one switch set."""
    moe = loaded.scenario.moe
    switches = moe.switches.model_copy(update={name: value})
    sections = {"moe": moe.model_copy(update={"switches": switches})}
    return replace(loaded, scenario=loaded.scenario.model_copy(update=sections))

"""What a reader has to know beside a verdict: rules modelled otherwise, idle switches."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from actors.plan import LayerPlan
from actors.planning import plan_of
from moe.formats import DispatchFormat, GemmLayout, Platform, QuantRecipe, ScaleFormat
from moe.platforms import PLATFORMS
from scenarios.loader import LoadedScenario
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


def notes_of(loaded: LoadedScenario) -> list[str]:
    """Where the rules modelled are the reference's and not SGLang 0.5.21's as written."""
    return [*_of_bf16_experts(loaded), *_of_nodes(loaded), *_of_platform(loaded)]


def _of_bf16_experts(loaded: LoadedScenario) -> Iterator[str]:
    limit = loaded.model.swiglu_limit
    if loaded.scenario.moe.recipe is QuantRecipe.BF16 and limit is not None:
        yield (
            f"experts clamp at {limit:g}, as the model says; the bf16 experts of SGLang 0.5.21 do "
            "not (by reading of its source)"
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
            f"{moe.dispatcher} quantises with {scales} scales; on {platform.name} the wire of "
            f"SGLang 0.5.21 has {platform.low_latency_scales} scales, which it rounds up later "
            "without quantising again (by reading of its source)"
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

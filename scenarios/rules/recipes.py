"""Rules on quantisation recipes: scales a platform lacks, groups that must be whole."""

from typing import Final

from moe.formats import ActivationKind, DispatchFormat, QuantRecipe, ScaleFormat
from moe.platforms import PLATFORMS
from moe.recipes import RECIPES, WeightFormat
from scenarios.rules.rule import Rule, RuleKind, Sized, sections
from scenarios.rules.sizes import shards_the_shared_expert
from scenarios.schema import Scenario

FP4_GROUP: Final = 32
"""Columns that share a scale in a checkpoint of fp4 experts."""


def missing_scales(scenario: Scenario) -> str | None:
    """Why a recipe's GEMM could not read the scales of a platform, or None if it can."""
    platform, recipe = PLATFORMS[scenario.platform], RECIPES[scenario.moe.recipe]
    if not recipe.needs_ue8m0 or platform.activation_scales is ScaleFormat.UE8M0:
        return None
    able = (name for name, facts in PLATFORMS.items() if recipe.name in facts.native_recipes)
    return (
        f"{recipe.name} has power-of-two scales, {platform.name}'s GEMMs read fp32: use platform "
        f"{' or '.join(able)}"
    )


def _keeps_fp32(scenario: Scenario) -> str | None:
    moe = scenario.moe
    reaches = moe.dispatcher is DispatchFormat.DEEPEP_V2 and moe.recipe is QuantRecipe.MXFP8
    if not moe.switches.silu_mul_keep_fp32 or reaches:
        return None
    return f"is set for deepep_v2 with mxfp8 alone, this is {moe.dispatcher} with {moe.recipe}"


def _keeps_fp32_of_silu(subject: Sized) -> str | None:
    kind = subject.model.activation.kind
    keeps = subject.scenario.moe.switches.silu_mul_keep_fp32
    if not keeps or kind is ActivationKind.SILU:
        return None
    return f"is about silu, {subject.model.name} has {kind}"


def _situ_with_v2(subject: Sized) -> str | None:
    is_v2 = subject.scenario.moe.dispatcher is DispatchFormat.DEEPEP_V2
    if not is_v2 or subject.model.activation.kind is not ActivationKind.SITU:
        return None
    return f"deepep_v2 asserts silu; {subject.model.name} has situ"


def _groups_are_whole(subject: Sized) -> str | None:
    """Scales cover whole groups of columns on both sides of both GEMMs, and whole blocks."""
    if not subject.is_quantised or subject.model.moe_intermediate_size % _moe_tp(subject):
        return None
    widths = _stored_widths(subject) + _grouped_widths(subject)
    split = [text for text, width, group in widths if width % group]
    if not split:
        return None
    return f"{subject.scenario.moe.recipe} needs whole groups; split: {', '.join(split)}"


def _stored_widths(subject: Sized) -> list[tuple[str, int, int]]:
    """Of a model whose sizes are padded: what its checkpoint holds in groups, without padding.

    As of ``_grouped_widths``.
    """
    stored = {
        "hidden_size": (subject.model.hidden_size, subject.hidden_size),
        "moe_intermediate_size": (subject.model.moe_intermediate_size, subject.intermediate_size),
    }
    return [
        (f"{name}({width}) as stored into {FP4_GROUP}s", width, FP4_GROUP)
        for name, (width, padded) in stored.items()
        if width != padded
    ]


def _grouped_widths(subject: Sized) -> list[tuple[str, int, int]]:
    """(as a message names it, width, what it must be a multiple of)."""
    model, inputs, middle = subject.model, subject.input_group, subject.middle_group
    hidden = _with_padding("hidden_size", model.hidden_size, subject.hidden_size)
    width = _with_padding(
        "moe_intermediate_size", model.moe_intermediate_size, subject.intermediate_size
    )
    partition = f"{width} / moe tp({_moe_tp(subject)}) = {subject.partition}"
    widths = [
        (f"{hidden} into {inputs}s", subject.hidden_size, inputs),
        (f"{partition} into {middle}s", subject.partition, middle),
    ]
    shared, group = model.shared_intermediate_size, _shared_group(subject)
    if shared:
        widths += [
            (f"shared_intermediate_size({shared}) into {group}s", shared, group),
            (
                f"hidden_size({model.hidden_size}) of the shared expert into {group}s",
                model.hidden_size,
                group,
            ),
        ]
    return widths


def _with_padding(name: str, published: int, padded: int) -> str:
    return f"{name}({published})" + (f" padded to {padded}" if padded != published else "")


def _padded_experts_are_whole(subject: Sized) -> str | None:
    tp, unit = _moe_tp(subject), subject.model.pads_to
    is_padded = RECIPES[subject.scenario.moe.recipe].checkpoint is WeightFormat.MXFP4
    if unit is None or not is_padded or tp == 1:
        return None
    return (
        f"moe tp({tp}) would cut experts that are padded to multiples of {unit}; upstream pads "
        "each rank's part, which is not modelled: use moe tp 1"
    )


def _moe_tp(subject: Sized) -> int:
    return subject.scenario.parallel.moe.tp


def _shared_group(subject: Sized) -> int:
    """Columns, and where weights come in blocks rows, that the shared expert is split into."""
    recipe = RECIPES[RECIPES[subject.scenario.moe.recipe].shared]
    block = recipe.weight_block or (1, 1)
    return max(*block, recipe.activation_group or 1)


def _shared_shards_are_whole(subject: Sized) -> str | None:
    """The shared expert's intermediate axis over all ranks, where it is sharded."""
    scenario, model = subject.scenario, subject.model
    world, width = scenario.parallel.world_size, model.shared_intermediate_size
    if not width or not shards_the_shared_expert(scenario):
        return None
    text = f"shared_intermediate_size({width}) / world_size({world})"
    if width % world:
        return f"{text} leaves a rest; use shared_experts: replicated"
    group = _shared_group(subject)
    if subject.is_quantised and width // world % group:
        recipe = RECIPES[scenario.moe.recipe].shared
        return (
            f"{text} = {width // world}, and {recipe} needs whole groups of {group}; "
            "use shared_experts: replicated"
        )
    return None


RECIPE_RULES: Final[tuple[Rule[Scenario], ...]] = (
    Rule(
        name="recipe_has_its_scales_on_platform",
        kind=RuleKind.SEMANTIC,
        field="moe.recipe",
        reads=sections("moe", "platform"),
        check=missing_scales,
        source="SGLang 0.5.21, moe_runner/deep_gemm.py::DeepGemmMoeQuantInfo (asserts UE8M0)",
    ),
    Rule(
        name="fp32_is_kept_for_deepep_v2_with_mxfp8",
        kind=RuleKind.SEMANTIC,
        field="moe.switches.silu_mul_keep_fp32",
        reads=sections("moe"),
        check=_keeps_fp32,
        source="SGLang 0.5.21, layers/moe: set for deepep_v2, MXFP8 and a registry entry alone",
    ),
)

GROUP_RULES: Final[tuple[Rule[Sized], ...]] = (
    Rule(
        name="quantisation_groups_are_whole",
        kind=RuleKind.SEMANTIC,
        field="moe.recipe",
        reads=sections("parallel", "moe", "batch", "platform"),
        check=_groups_are_whole,
        source="SGLang 0.5.21, layers/quantization/fp8.py::create_weights",
    ),
    Rule(
        name="padded_experts_are_whole",
        kind=RuleKind.SEMANTIC,
        field="parallel.moe.tp",
        reads=sections("parallel", "moe"),
        check=_padded_experts_are_whole,
        source="SGLang 0.5.21, quantization/mxfp4.py::Mxfp4MoEMethod.create_weights",
    ),
    Rule(
        name="shards_of_the_shared_expert_are_whole",
        kind=RuleKind.SEMANTIC,
        field="moe.shared_experts",
        reads=sections("parallel", "moe"),
        check=_shared_shards_are_whole,
        source="SGLang 0.5.21, layers/quantization/fp8.py::create_weights (block sharding)",
    ),
    Rule(
        name="fp32_is_kept_of_silu",
        kind=RuleKind.SEMANTIC,
        field="moe.switches.silu_mul_keep_fp32",
        reads=sections("moe"),
        check=_keeps_fp32_of_silu,
        source="SGLang 0.5.21, moe_runner/deep_gemm.py (needs gated silu, no gemm1_alpha)",
    ),
    Rule(
        name="deepep_v2_takes_silu",
        kind=RuleKind.POLICY,
        field="moe.dispatcher",
        reads=sections("moe"),
        check=_situ_with_v2,
        source="SGLang 0.5.21, layers/moe/token_dispatcher/deepep_v2.py",
    ),
)

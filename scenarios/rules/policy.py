"""Pairings that an SGLang server refuses although they have a meaning; no model size."""

from typing import Final

from moe.formats import DispatchFormat, Phase, QuantRecipe
from moe.platforms import PLATFORMS
from scenarios.layouts import is_expanded
from scenarios.rules.recipes import missing_scales
from scenarios.rules.rule import Rule, RuleKind, sections
from scenarios.schema import Scenario

_WITH_V2: Final = (
    QuantRecipe.BF16,
    QuantRecipe.FP8_BLOCK128,
    QuantRecipe.MXFP8,
    QuantRecipe.MXFP4_AS_FP8,  # fp8 blocks once they are loaded
)


def _v2_expands_in_decode(scenario: Scenario) -> str | None:
    moe, phase = scenario.moe, scenario.batch.phase
    if moe.dispatcher != DispatchFormat.DEEPEP_V2 or moe.expanded == "auto":
        return None
    if moe.expanded == (phase == Phase.DECODE):
        return None
    return f"{moe.expanded} in {phase}; the server expands in decode alone"


def _v2_expands_into_slabs(scenario: Scenario) -> str | None:
    moe = scenario.moe
    is_v2 = moe.dispatcher == DispatchFormat.DEEPEP_V2
    if not is_v2 or moe.layout != "compact" or not is_expanded(scenario):
        return None
    return "'compact', but deepep_v2 expanded is 'masked'; the runner's path for it is never taken"


def _flashinfer_is_all_dp(scenario: Scenario) -> str | None:
    dp, world = scenario.parallel.attention.dp, scenario.parallel.world_size
    if scenario.moe.dispatcher != DispatchFormat.FLASHINFER or dp == world:
        return None
    kind = "pure TP" if dp == 1 else f"attention dp({dp})"
    return f"flashinfer with {kind}; the server wants attention dp == world_size({world})"


def _v2_takes_recipe(scenario: Scenario) -> str | None:
    moe = scenario.moe
    if moe.dispatcher != DispatchFormat.DEEPEP_V2 or moe.recipe in _WITH_V2:
        return None
    kind = "fp4 experts" if moe.recipe is QuantRecipe.MXFP4_W4A8 else moe.recipe
    return f"deepep_v2 rejects {kind}; it takes {', '.join(_WITH_V2)}"


def _recipe_of_platform(scenario: Scenario) -> str | None:
    platform, recipe = PLATFORMS[scenario.platform], scenario.moe.recipe
    if missing_scales(scenario) is not None:  # refused for more than a policy
        return None
    return platform.refusal(recipe)


POLICY_RULES: Final[tuple[Rule[Scenario], ...]] = (
    Rule(
        name="deepep_v2_expands_in_decode",
        kind=RuleKind.POLICY,
        field="moe.expanded",
        reads=sections("moe", "batch"),
        check=_v2_expands_in_decode,
        source="SGLang 0.5.21, layers/moe/token_dispatcher/deepep_v2.py (by is_extend_in_batch)",
    ),
    Rule(
        name="deepep_v2_expands_into_slabs",
        kind=RuleKind.POLICY,
        field="moe.layout",
        reads=sections("moe", "batch"),
        check=_v2_expands_into_slabs,
        source="SGLang 0.5.21, layers/moe/token_dispatcher/deepep_v2.py (use_masked is use_expand)",
    ),
    Rule(
        name="flashinfer_wants_attention_dp_alone",
        kind=RuleKind.POLICY,
        field="parallel.attention.dp",
        reads=sections("parallel", "moe"),
        check=_flashinfer_is_all_dp,
        source="SGLang 0.5.21, server_args.py (flashinfer a2a: dp_size == tp_size)",
    ),
    Rule(
        name="deepep_v2_takes_the_recipe",
        kind=RuleKind.POLICY,
        field="moe.recipe",
        reads=sections("moe"),
        check=_v2_takes_recipe,
        source="SGLang 0.5.21, layers/moe/token_dispatcher/deepep_v2.py",
    ),
    Rule(
        name="recipe_has_kernels_on_platform",
        kind=RuleKind.POLICY,
        field="moe.recipe",
        reads=sections("moe", "platform"),
        check=_recipe_of_platform,
        source="SGLang 0.5.21, layers/deep_gemm_wrapper/configurer.py",
    ),
)

"""From a checked scenario to the plan of its ranks and the facts of its verdict."""

from dataclasses import fields, replace

from actors.dispatchers import placement
from actors.gemm import gemm_backend, widths_of
from actors.machine import device_of, gemm_of, kernels_of
from actors.plan import LayerPlan
from moe.arithmetic import AccumulatorWidths
from moe.devices import weights_on
from moe.formats import (
    DispatchFormat,
    GatedActivation,
    QuantRecipe,
    RunnerBackend,
    ScaleFormat,
    SharedExpertMode,
)
from moe.golden import GoldenRouting
from moe.padding import PaddedWeights
from moe.platforms import PLATFORMS
from moe.routing import RoutingRule
from moe.weights import WeightSource
from reports.verdict.layer import JudgedLayer
from scenarios.checkpoints import open_checkpoint
from scenarios.exact_weights import ExactWeights
from scenarios.layouts import (
    has_bf16_wire,
    is_expanded,
    layout_choice,
    padded_sizes,
    rows_into_the_runner,
)
from scenarios.loader import LoadedScenario
from scenarios.parallel import parallel_layout, sync_of
from scenarios.rules.dispatch import dispatch_capacity
from scenarios.rules.sizes import shards_the_shared_expert
from scenarios.schema import Scenario
from scenarios.stored import StoredWeights, stored_weights
from scenarios.synthetic_weights import SyntheticWeights

EXPERT_ROW_ALIGNMENT = 128


def plan_of(loaded: LoadedScenario, mode: str = "random") -> LayerPlan:
    """What every rank is told, in a mode of the inputs: exact inputs have weights of their own."""
    scenario, model = loaded.scenario, loaded.model
    moe = scenario.moe
    folds, platform = moe.dispatcher.folds_scaling_factor, PLATFORMS[scenario.platform]
    return LayerPlan(
        layout=parallel_layout(scenario),
        sync=sync_of(scenario),
        num_experts=model.n_routed_experts,
        redundant=moe.redundant_experts,
        shuffled_by=scenario.inputs.seed if moe.placement == "shuffled" else None,
        routing=_routing(loaded),
        dispatch_format=moe.dispatcher,
        gemm_layout=layout_choice(scenario, model).layout,
        runner=RunnerBackend.DEEP_GEMM,
        recipe=moe.recipe,
        scale_format=platform.scale_format(moe.recipe),
        wire_format=wire_format(scenario),
        shared=shared_mode(loaded),
        gathers_fp8=moe.switches.dp_gather_fp8,
        row_alignment=row_alignment(loaded),
        activation=activation_of(loaded),
        expert_hidden_size=padded_sizes(model, moe.recipe)[0],
        routed_scaling_factor=model.routed_scaling_factor,
        tail_scaling_factor=1.0 if folds else model.routed_scaling_factor,
        weights=_weights(loaded, mode),
        seed=scenario.inputs.seed,
        phase=scenario.batch.phase,
        expanded=is_expanded(scenario),
        capacity=dispatch_capacity(scenario),
        bf16_wire=has_bf16_wire(scenario),
        caps_slabs=moe.switches.masked_m_cap,
        zeroes_padding=moe.switches.deterministic,
        masks_slots=moe.switches.mask_dp_pad_moe,
        wide_segments=has_wide_segments(loaded),
        gemm=gemm_of(loaded).name,
        device=device_of(scenario).name,
        kernels=kernels_of(loaded).name,
    )


def _routing(loaded: LoadedScenario) -> RoutingRule:
    model = loaded.model
    return RoutingRule(
        top_k=model.num_experts_per_tok,
        scoring_func=model.scoring_func,
        renormalize=model.norm_topk_prob,
        n_group=model.n_group,
        topk_group=model.topk_group,
        deepseek_v41=model.deepseek_v41,
        hashed=loaded.scenario.model.layer == "hash_moe",
    )


def shared_mode(loaded: LoadedScenario) -> SharedExpertMode | None:
    """Where the shared expert is computed; None where the model has none.

    Source: SGLang 0.5.21, models/deepseek_v2.py (a2a, or SGLANG_SHARED_EXPERT_TP1: whole).
    """
    moe = loaded.scenario.moe
    if not loaded.model.n_shared_experts:
        return None
    if moe.shared_experts != "auto":
        return SharedExpertMode(moe.shared_experts)
    if shards_the_shared_expert(loaded.scenario):
        return SharedExpertMode.TP_SHARDED
    gathers = (
        moe.dispatcher is DispatchFormat.STANDARD and loaded.scenario.parallel.attention.dp > 1
    )
    is_local = moe.switches.dp_shared_expert_local and gathers
    return SharedExpertMode.LOCAL if is_local else SharedExpertMode.REPLICATED


def row_alignment(loaded: LoadedScenario) -> int:
    """Rows to which an expert's segment is padded: DeepGEMM's answer, or 128.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py.
    """
    scenario = loaded.scenario
    if not scenario.moe.dispatcher.folds_scaling_factor or has_wide_segments(loaded):
        return EXPERT_ROW_ALIGNMENT
    slots = loaded.model.n_routed_experts + scenario.moe.redundant_experts
    return PLATFORMS[scenario.platform].segment_alignment(
        rows_into_the_runner(scenario) * loaded.model.num_experts_per_tok,
        slots // scenario.parallel.moe.ep,
    )


def has_wide_segments(loaded: LoadedScenario) -> bool:
    """Whether the platform takes a contiguous path of its own: many rows, codes, every expert here.

    Source: SGLang 0.5.21, deep_gemm_sm120.maybe_pre_permute.
    """
    scenario = loaded.scenario
    at_least = PLATFORMS[scenario.platform].wide_segment_rows
    return (
        at_least is not None
        and scenario.moe.dispatcher is DispatchFormat.STANDARD
        and scenario.moe.recipe is not QuantRecipe.BF16
        and scenario.parallel.moe.ep == 1
        and rows_into_the_runner(scenario) >= at_least
    )


def wire_format(scenario: Scenario) -> ScaleFormat:
    """Scales of what dispatch quantises; low latency has its own flag upstream.

    Source: SGLang 0.5.21, token_dispatcher/deepep.py (DEEPGEMM_BLACKWELL).
    """
    platform, moe = PLATFORMS[scenario.platform], scenario.moe
    due = platform.scale_format(moe.recipe)
    own = moe.dispatcher.is_low_latency and due is not ScaleFormat.NONE
    return platform.low_latency_scales if own else due


def activation_of(loaded: LoadedScenario) -> GatedActivation:
    """The model's, with what a switch changes in it."""
    keeps_fp32 = loaded.scenario.moe.switches.silu_mul_keep_fp32
    return replace(loaded.model.activation, keeps_fp32=keeps_fp32)


def _weights(loaded: LoadedScenario, mode: str) -> WeightSource:
    """The layer's weights, with zeros around the experts where these are padded."""
    source, model = _weight_source(loaded, mode), loaded.model
    hidden, width = padded_sizes(model, loaded.scenario.moe.recipe)
    if (hidden, width) == (model.hidden_size, model.moe_intermediate_size):
        return source
    return PaddedWeights(source=source, hidden_size=hidden, intermediate_size=width)


def unpadded(weights: WeightSource) -> WeightSource:
    """The source itself: the verdict pads for itself."""
    return weights.source if isinstance(weights, PaddedWeights) else weights


def _weight_source(loaded: LoadedScenario, mode: str) -> WeightSource:
    scenario, model = loaded.scenario, loaded.model
    hashed, platform = scenario.model.layer == "hash_moe", PLATFORMS[scenario.platform]
    packs = platform.scale_format(scenario.moe.recipe) is ScaleFormat.UE8M0
    if loaded.stored is not None:
        return stored_weights(loaded.stored, mode, model)
    if scenario.model.weights.kind == "safetensors":
        return open_checkpoint(
            scenario.model.weights,
            model,
            scenario.moe.recipe,
            hashed=hashed,
            power_of_two_scales=packs,
        )
    drawn = SyntheticWeights(
        seed=scenario.inputs.seed,
        hidden_size=model.hidden_size,
        intermediate_size=model.moe_intermediate_size,
        shared_intermediate_size=model.shared_intermediate_size,
        num_experts=model.n_routed_experts,
        correction_bias=model.correction_bias and not hashed,
        recipe=scenario.moe.recipe,
        routing_kind=scenario.batch.routing.kind,
        vocab_size=model.vocab_size,
        hash_slots=model.num_experts_per_tok if hashed else 0,
        power_of_two_scales=packs,
    )
    if mode != "exact":
        return drawn
    return ExactWeights(
        **{field.name: getattr(drawn, field.name) for field in fields(drawn)},
        activation=model.activation,
        scale_format=platform.scale_format(scenario.moe.recipe),
    )


def judged_layer(plan: LayerPlan, loaded: LoadedScenario) -> JudgedLayer:
    """The same facts for the verdict."""
    model = loaded.model
    expert_hidden, intermediate = padded_sizes(model, plan.recipe)
    return JudgedLayer(
        layout=plan.layout,
        tokens=loaded.scenario.batch.tokens,
        sync=plan.sync,
        dispatch_format=plan.dispatch_format,
        gemm_layout=plan.gemm_layout,
        hidden_size=model.hidden_size,
        expert_hidden_size=expert_hidden,
        intermediate_size=intermediate,
        shared_intermediate_size=model.shared_intermediate_size,
        num_experts=plan.num_experts,
        slot_experts=placement(plan).physical_to_logical,
        routing=_golden_routing(plan.routing),
        routed_scaling_factor=plan.routed_scaling_factor,
        activation=plan.activation,
        recipe=plan.recipe,
        scale_format=plan.scale_format,
        wire_format=plan.wire_format,
        shared=plan.shared,
        row_alignment=plan.row_alignment,
        arithmetic=gemm_backend(plan.gemm, plan.device).arithmetic(plan.scale_format),
        widths=_widths(plan),
        weights=weights_on(unpadded(plan.weights), plan.device),
        gathers_fp8=plan.gathers_fp8,
        platform=loaded.scenario.platform,
        phase=plan.phase,
        seed=plan.seed,
        expanded=plan.expanded,
        capacity=plan.capacity,
        bf16_wire=plan.bf16_wire,
        caps_slabs=plan.caps_slabs,
        zeroes_padding=plan.zeroes_padding,
        masks_slots=plan.masks_slots,
        wide_segments=plan.wide_segments,
    )


def _widths(plan: LayerPlan) -> AccumulatorWidths | None:
    """Of the GEMM backend, where inputs are exact: their certificate rests on them."""
    weights = unpadded(plan.weights)
    stored_exact = isinstance(weights, StoredWeights) and weights.is_exact
    is_exact = isinstance(weights, ExactWeights) or stored_exact
    return widths_of(plan.gemm, plan.scale_format, plan.device) if is_exact else None


def _golden_routing(rule: RoutingRule) -> GoldenRouting:
    """The same rule in the golden's own words."""
    return GoldenRouting(
        top_k=rule.top_k,
        scoring_func=rule.scoring_func,
        renormalize=rule.renormalize,
        n_group=rule.n_group,
        topk_group=rule.topk_group,
        deepseek_v41=rule.deepseek_v41,
        hashed=rule.hashed,
    )

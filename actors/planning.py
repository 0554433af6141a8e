"""From a checked scenario to the plan of its ranks and the facts of its verdict."""

from actors.dispatchers import placement
from actors.plan import LayerPlan
from moe.formats import (
    DispatchFormat,
    GemmLayout,
    Phase,
    Platform,
    QuantRecipe,
    RunnerBackend,
    ScaleFormat,
    SharedExpertMode,
)
from moe.golden import GoldenRouting
from moe.grouped_gemm import TorchGemm
from moe.routing import RoutingRule
from moe.weights import WeightSource
from reports.verdict.layer import JudgedLayer
from scenarios.checkpoints import open_checkpoint
from scenarios.inputs import SyntheticWeights
from scenarios.loader import LoadedScenario
from scenarios.parallel import parallel_layout, sync_of
from scenarios.rules.dispatch import dispatch_capacity
from scenarios.rules.sizes import shards_the_shared_expert
from scenarios.schema import Scenario

EXPERT_ROW_ALIGNMENT = 128


def plan_of(loaded: LoadedScenario) -> LayerPlan:
    """What every rank is told."""
    scenario, model = loaded.scenario, loaded.model
    moe = scenario.moe
    return LayerPlan(
        layout=parallel_layout(scenario),
        sync=sync_of(scenario),
        num_experts=model.n_routed_experts,
        redundant=moe.redundant_experts,
        shuffled_by=scenario.inputs.seed if moe.placement == "shuffled" else None,
        routing=_routing(loaded),
        dispatch_format=moe.dispatcher,
        gemm_layout=gemm_layout(loaded),
        runner=RunnerBackend.DEEP_GEMM,
        recipe=moe.recipe,
        scale_format=scale_format(moe.recipe, scenario.platform),
        shared=shared_mode(loaded),
        gathers_fp8=moe.switches.dp_gather_fp8,
        row_alignment=row_alignment(loaded),
        swiglu_limit=model.swiglu_limit,
        routed_scaling_factor=model.routed_scaling_factor,
        weights=_weights(loaded),
        seed=scenario.inputs.seed,
        phase=scenario.batch.phase,
        expanded=is_expanded(scenario),
        capacity=dispatch_capacity(scenario),
        bf16_wire=moe.switches.deepep_bf16_dispatch,
        caps_slabs=moe.switches.masked_m_cap,
        zeroes_padding=moe.switches.deterministic,
        masks_slots=moe.switches.mask_dp_pad_moe,
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


def gemm_layout(loaded: LoadedScenario) -> GemmLayout:
    """What the dispatcher hands over; where it leaves the choice, segments unless asked."""
    moe = loaded.scenario.moe
    if moe.dispatcher.is_low_latency:
        return GemmLayout.MASKED
    if moe.dispatcher is DispatchFormat.DEEPEP_V2 and moe.layout == "auto":
        expanded = is_expanded(loaded.scenario)
        return GemmLayout.MASKED if expanded else GemmLayout.CONTIG
    return GemmLayout.MASKED if moe.layout == "masked" else GemmLayout.CONTIG


def is_expanded(scenario: Scenario) -> bool:
    """Whether deepep_v2 hands over one row a route: by default in decode.

    Source: SGLang 0.5.21, token_dispatcher/deepep_v2.py.
    """
    if scenario.moe.dispatcher is not DispatchFormat.DEEPEP_V2:
        return False
    if scenario.moe.expanded == "auto":
        return scenario.batch.phase is Phase.DECODE
    return scenario.moe.expanded


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

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py; DeepGEMM, get_contiguous_layout_alignment, as
    the released 0.2.0 library answers.
    """
    scenario = loaded.scenario
    if not scenario.moe.dispatcher.folds_scaling_factor:
        return EXPERT_ROW_ALIGNMENT
    rows = rows_into_the_runner(scenario)
    slots = loaded.model.n_routed_experts + scenario.moe.redundant_experts
    local = slots // scenario.parallel.moe.ep
    return contiguous_alignment(scenario.platform, rows * loaded.model.num_experts_per_tok, local)


def rows_into_the_runner(scenario: Scenario) -> int:
    """Rows that a rank's runner is handed, where these are tokens: T of the layout's rule.

    FlashInfer's decode has a slot of equal height for each rank, however few rows it holds.
    """
    layer = sync_of(scenario).layer
    if scenario.moe.dispatcher is not DispatchFormat.FLASHINFER:
        return len(layer[0])
    lengths = [len(rows) for rows in layer]
    in_slots = scenario.batch.phase is Phase.DECODE
    return max(lengths) * len(lengths) if in_slots else sum(lengths)


def contiguous_alignment(platform: Platform, routes: int, local_experts: int) -> int:
    """The tile height that wastes least for so many rows an expert.

    Args:
        platform: sm90 has one answer; sm100 steps down from 224, sm120 from 128.
        routes: slots of all rows, those of other ranks included.
        local_experts: expert slots of a rank.
    """
    start = {Platform.SM90: 0, Platform.SM100: 224, Platform.SM120: 128}[platform]
    if start == 0:
        return EXPERT_ROW_ALIGNMENT
    rows = -(-routes // local_experts)
    block = start
    while block - 32 >= max(rows, 32):
        block -= 32
    if platform is Platform.SM120 and block == 96:
        return EXPERT_ROW_ALIGNMENT
    return min(block, EXPERT_ROW_ALIGNMENT)


def scale_format(recipe: QuantRecipe, platform: Platform) -> ScaleFormat:
    """How scales are stored: fp32 on SM90, packed powers of two on Blackwell.

    Source: SGLang 0.5.21, DEEPGEMM_SCALE_UE8M0.
    """
    if recipe is QuantRecipe.BF16:
        return ScaleFormat.NONE
    return ScaleFormat.FP32 if platform is Platform.SM90 else ScaleFormat.UE8M0


def _weights(loaded: LoadedScenario) -> WeightSource:
    scenario, model = loaded.scenario, loaded.model
    hashed = scenario.model.layer == "hash_moe"
    if scenario.model.weights.kind == "safetensors":
        return open_checkpoint(scenario.model.weights, model, scenario.moe.recipe, hashed=hashed)
    return SyntheticWeights(
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
    )


def judged_layer(plan: LayerPlan, loaded: LoadedScenario) -> JudgedLayer:
    """The same facts for the verdict."""
    model = loaded.model
    return JudgedLayer(
        layout=plan.layout,
        tokens=loaded.scenario.batch.tokens,
        sync=plan.sync,
        dispatch_format=plan.dispatch_format,
        gemm_layout=plan.gemm_layout,
        hidden_size=model.hidden_size,
        intermediate_size=model.moe_intermediate_size,
        shared_intermediate_size=model.shared_intermediate_size,
        num_experts=plan.num_experts,
        slot_experts=placement(plan).physical_to_logical,
        routing=_golden_routing(plan.routing),
        routed_scaling_factor=plan.routed_scaling_factor,
        swiglu_limit=plan.swiglu_limit,
        recipe=plan.recipe,
        scale_format=plan.scale_format,
        shared=plan.shared,
        row_alignment=plan.row_alignment,
        arithmetic=TorchGemm().arithmetic(plan.scale_format),
        weights=plan.weights,
        gathers_fp8=plan.gathers_fp8,
        phase=plan.phase,
        expanded=plan.expanded,
        capacity=plan.capacity,
        bf16_wire=plan.bf16_wire,
        caps_slabs=plan.caps_slabs,
        zeroes_padding=plan.zeroes_padding,
        masks_slots=plan.masks_slots,
    )


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

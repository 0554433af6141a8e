"""Rules on the model's sizes: what divides what."""

from typing import Final

from moe.formats import COMBINED_TOP_K, OTHER_COMBINED_TOP_K, DispatchFormat, Phase
from scenarios.rules.rule import BLOCK, Rule, RuleKind, Sized, sections
from scenarios.schema import Scenario

SCORED_BY: Final = 2
"""Experts whose ranks add up to that of their group, where the router has a correction bias."""

_REGISTERED_WITH_V2: Final = ("deepseek_v3", "deepseek_v4", "kimi_k2", "qwen3_moe", "glm5_next")


def _top_k_fits(subject: Sized) -> str | None:
    k, experts = subject.model.num_experts_per_tok, subject.model.n_routed_experts
    if k <= experts:
        return None
    return f"num_experts_per_tok({k}) > n_routed_experts({experts})"


def _groups_fit(subject: Sized) -> str | None:
    model = subject.model
    experts, groups, chosen = model.n_routed_experts, model.n_group, model.topk_group
    if experts % groups:
        return f"n_routed_experts({experts}) is not divisible by n_group({groups})"
    if chosen > groups:
        return f"topk_group({chosen}) > n_group({groups})"
    if groups > 1 and model.correction_bias and experts // groups < SCORED_BY:
        return f"a group is scored by its best {SCORED_BY}; n_group({groups}) leaves it one expert"
    if model.num_experts_per_tok > chosen * (experts // groups):
        reach = f"topk_group({chosen}) * {experts // groups} experts a group"
        return f"num_experts_per_tok({model.num_experts_per_tok}) > {reach}"
    return None


def _a_rank_has_an_expert(subject: Sized) -> str | None:
    ep, slots = subject.scenario.parallel.moe.ep, subject.num_physical_experts
    if ep <= slots:
        return None
    return f"{ep} expert-parallel ranks for {slots} experts: some would hold none"


def _experts_divide(subject: Sized) -> str | None:
    ep, slots = subject.scenario.parallel.moe.ep, subject.num_physical_experts
    if ep > slots or slots % ep == 0:
        return None
    redundant = subject.scenario.moe.redundant_experts
    total = f"n_routed_experts({slots - redundant}) + redundant_experts({redundant})"
    return f"{total} = {slots} is not divisible by moe ep({ep})"


def _intermediate_divides(subject: Sized) -> str | None:
    width, tp = subject.model.moe_intermediate_size, subject.scenario.parallel.moe.tp
    if width % tp == 0:
        return None
    return f"moe_intermediate_size({width}) is not divisible by moe tp({tp})"


def shards_the_shared_expert(scenario: Scenario) -> bool:
    """Whether ranks hold parts of it: without an all-to-all, unless it is asked for whole."""
    moe = scenario.moe
    if moe.shared_experts != "auto":
        return moe.shared_experts == "tp_sharded"
    return moe.dispatcher == DispatchFormat.STANDARD and not moe.switches.shared_expert_tp1


def _made_routing_fits(subject: Sized) -> str | None:
    """Routes that are made, not chosen, need a layer and a placement they can be made for."""
    match subject.scenario.batch.routing.kind:
        case "one_rank":
            return _one_rank_fits(subject)
        case "hot_expert":
            return _hot_expert_fits(subject)
        case "ties" | "all_negative":
            return _made_gate_fits(subject)
    return None


def _one_rank_fits(subject: Sized) -> str | None:
    scenario, top_k = subject.scenario, subject.model.num_experts_per_tok
    held = subject.model.n_routed_experts // scenario.parallel.moe.ep
    if (scenario.moe.placement, scenario.moe.redundant_experts) != ("contiguous", 0):
        return "'one_rank' is a block of experts; shuffled or redundant slots scatter it"
    if held < top_k:
        return f"'one_rank' gives a token {top_k} experts of {held} on a rank"
    return None


def _hot_expert_fits(subject: Sized) -> str | None:
    top_k, rest = subject.model.num_experts_per_tok, subject.model.n_routed_experts - 1
    if top_k <= rest:
        return None
    return f"'hot_expert' draws {top_k} experts beside it, there are {rest}"


def _made_gate_fits(subject: Sized) -> str | None:
    scenario = subject.scenario
    kind = scenario.batch.routing.kind
    if scenario.model.weights.kind == "safetensors":
        return f"{kind!r} makes the gate; a checkpoint has its own"
    if kind == "all_negative" and "file" in scenario.inputs.modes:
        return "'all_negative' makes column 0 of the tokens; captured ones have their own"
    if scenario.model.layer == "hash_moe":
        return f"{kind!r} is about the router's choice; a hash layer chooses by table"
    return None


def _gathered_groups_are_whole(subject: Sized) -> str | None:
    hidden = subject.model.hidden_size
    if not subject.scenario.moe.switches.dp_gather_fp8 or hidden % BLOCK == 0:
        return None
    return f"hidden_size({hidden}) does not split into the fp8 wire's groups of {BLOCK}"


def _hash_layer_exists(subject: Sized) -> str | None:
    if subject.scenario.model.layer == "moe" or subject.model.num_hash_layers > 0:
        return None
    return f"hash_moe, but {subject.model.name} has no hash layers"


def _combine_tree_is_known(subject: Sized) -> str | None:
    """Of decode; prefill sums by a reduce-scatter."""
    k, scenario = subject.model.num_experts_per_tok, subject.scenario
    one_sided = scenario.moe.dispatcher == DispatchFormat.FLASHINFER
    if not one_sided or scenario.batch.phase == Phase.EXTEND or k in COMBINED_TOP_K:
        return None
    known = f"flashinfer combines top-k {', '.join(map(str, COMBINED_TOP_K))}"
    if k in OTHER_COMBINED_TOP_K:
        return f"{known}; its order for {k} is out of scope here"
    return f"{known}; it has no tree for {k}"


def _registered_with_v2(subject: Sized) -> str | None:
    name = subject.model.name
    if subject.scenario.moe.dispatcher != DispatchFormat.DEEPEP_V2 or name in _REGISTERED_WITH_V2:
        return None
    return f"{name} is not registered with deepep_v2; it knows {', '.join(_REGISTERED_WITH_V2)}"


SIZE_RULES: Final[tuple[Rule[Sized], ...]] = (
    Rule(
        name="top_k_fits_the_experts",
        kind=RuleKind.SEMANTIC,
        field="model",
        reads=sections(),
        check=_top_k_fits,
        source="top-k of distinct experts",
    ),
    Rule(
        name="groups_fit_the_experts",
        kind=RuleKind.SEMANTIC,
        field="model",
        reads=sections(),
        check=_groups_fit,
        source="SGLang 0.5.21, layers/moe/topk.py::biased_grouped_topk",
    ),
    Rule(
        name="every_rank_has_an_expert",
        kind=RuleKind.SEMANTIC,
        field="parallel.moe.ep",
        reads=sections("parallel", "moe"),
        check=_a_rank_has_an_expert,
        source="SGLang 0.5.21, layers/moe/fused_moe_triton/layer.py",
    ),
    Rule(
        name="experts_divide_over_ranks",
        kind=RuleKind.SEMANTIC,
        field="parallel.moe.ep",
        reads=sections("parallel", "moe"),
        check=_experts_divide,
        source="SGLang 0.5.21, layers/moe/fused_moe_triton/layer.py",
    ),
    Rule(
        name="intermediate_divides_over_ranks",
        kind=RuleKind.SEMANTIC,
        field="parallel.moe.tp",
        reads=sections("parallel"),
        check=_intermediate_divides,
        source="SGLang 0.5.21, layers/moe/fused_moe_triton/layer.py",
    ),
    Rule(
        name="groups_of_an_fp8_gather_are_whole",
        kind=RuleKind.SEMANTIC,
        field="moe.switches.dp_gather_fp8",
        reads=sections("moe"),
        check=_gathered_groups_are_whole,
        source="SGLang 0.5.21, layers/dp_attention.py (fp8 gather, groups of 128)",
    ),
    Rule(
        name="a_made_routing_fits_the_layer",
        kind=RuleKind.SEMANTIC,
        field="batch.routing.kind",
        reads=sections("model", "parallel", "moe", "batch", "inputs"),
        check=_made_routing_fits,
        source="moe-assay: what a made routing needs",
    ),
    Rule(
        name="a_hash_layer_exists",
        kind=RuleKind.SEMANTIC,
        field="model.layer",
        reads=sections("model"),
        check=_hash_layer_exists,
        source="SGLang 0.5.21, models/deepseek_v4.py (layer_id < num_hash_layers)",
    ),
    Rule(
        name="flashinfer_has_a_tree_for_top_k",
        kind=RuleKind.SEMANTIC,
        field="moe.dispatcher",
        reads=sections("moe", "batch"),
        check=_combine_tree_is_known,
        source="FlashInfer 0.6.18, moeAlltoAllKernels.cu (combine)",
    ),
    Rule(
        name="model_is_registered_with_deepep_v2",
        kind=RuleKind.POLICY,
        field="moe.dispatcher",
        reads=sections("moe"),
        check=_registered_with_v2,
        source="SGLang 0.5.21, layers/moe/token_dispatcher/deepep_v2.py",
    ),
)

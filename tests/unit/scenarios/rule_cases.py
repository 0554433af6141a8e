"""Changes to the right scenario: one that breaks each rule, and the nearest that break none."""

import json
from copy import deepcopy

import yaml

from scenarios.resolve import resolve_model
from scenarios.schema import Scenario


def build(right, changes):
    raw = yaml.safe_load(right)
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = raw
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = deepcopy(value)  # a later path may go into it
    scenario = Scenario.model_validate_json(json.dumps(raw))
    return scenario, resolve_model(scenario.model, None)


LL = {"moe.dispatcher": "deepep_ll", "batch.phase": "decode"}
V2 = {"moe.dispatcher": "deepep_v2"}
FLASHINFER = {"moe.dispatcher": "flashinfer"}
STANDARD = {"moe.dispatcher": "standard"}
WHOLE_SHARED = {"moe.shared_experts": "replicated"}
WORLD4 = {"parallel.world_size": 4}
CP2 = {"parallel.attention": {"dp": 1, "cp": 2}, "batch.tokens": [8]}
TP2 = {"parallel.attention": {"dp": 1, "tp": 2}, "batch.tokens": [8]}
MOE_TP2 = {"parallel.moe": {"ep": 1, "tp": 2}, "model.overrides.moe_intermediate_size": 256}
ROWS = "moe.switches.max_dispatch_tokens_per_rank"
KEEP_FP32 = "moe.switches.silu_mul_keep_fp32"
KIMI_K3 = {"model": {"preset": "kimi_k3"}}
GPT_OSS = {"model": {"preset": "gpt_oss"}}
MXFP8 = {"moe.recipe": "mxfp8"}
GROUPS_OF_32 = {"model.overrides.hidden_size": 288}

# Rule -> changes to the right scenario that break it, and a piece of the message.
BROKEN = {
    "attention_degrees_multiply_to_world_size": (
        WORLD4,
        "attention dp(2) * tp(1) * cp(1) = 2 != world_size(4)",
    ),
    "moe_degrees_multiply_to_world_size": (WORLD4, "moe ep(2) * tp(1) = 2 != world_size(4)"),
    "one_token_count_a_group": ({"batch.tokens": [1, 2, 3]}, "3 counts for 2 attention-DP"),
    "all_to_all_needs_whole_experts": (MOE_TP2, "moe tp must be 1, is 2"),
    "dispatcher_has_context_parallelism": (V2 | CP2, "deepep_v2 has no context parallelism"),
    "gathered_context_parallelism_stands_alone": (
        STANDARD
        | {"parallel": {"world_size": 4, "attention": {"dp": 2, "cp": 2}, "moe": {"ep": 4}}},
        "cp(2) with dispatcher standard needs dp = tp = 1, has dp(2) tp(1)",
    ),
    "context_parallelism_is_for_prefill": (CP2 | {"batch.phase": "decode"}, "in decode it is"),
    "a_glue_exists": (
        STANDARD | TP2 | {"moe.reduce": "reduce_scatter"},
        "reduce reduce_scatter: every rank keeps every row, so nothing is scattered",
    ),
    "transport_fits_runtime": (
        {"run.runtime": "loopback", "run.backends.transport": "gloo"},
        "gloo connects processes",
    ),
    "exact_inputs_bring_their_weights": (
        {
            "inputs.modes": ["random", "exact"],
            "model.weights": {"kind": "safetensors", "path": "layer.safetensors", "layer": 3},
        },
        "mode exact with weights from safetensors",
    ),
    "expected_mode_runs": (
        {"expect": {"verdict": "discrepancy", "stage": "gemm1", "mode": "exact"}},
        "mode 'exact' does not run; inputs.modes has random",
    ),
    "rows_fit_the_dispatch_buffer": (LL | {"batch.tokens": [129, 0]}, "sends 129 rows"),
    "capacity_fits_the_low_latency_tags": (LL | {ROWS: 1025}, "1025 is over 1024"),
    "low_latency_slabs_come_in_fours": (LL | {ROWS: 9}, "2 ranks of 9 rows make slabs of 18"),
    "layout_is_the_dispatchers": ({"moe.layout": "masked"}, "segments, never slabs"),
    "layout_of_deepep_v2_follows_expansion": (
        V2 | {"moe.layout": "masked"},
        "'masked', but deepep_v2 not expanded is 'compact'",
    ),
    "sm120_has_no_masked_layout": (
        STANDARD | {"platform": "sm120", "moe.layout": "masked"},
        "sm120 never takes the masked layout",
    ),
    "compact_eager_comes_before_the_layout": (
        STANDARD | {"moe.layout": "masked", "moe.switches": {"compact_eager": True}},
        "'masked', but switch compact_eager takes compact before",
    ),
    "only_deepep_v2_expands": ({"moe.expanded": True}, "only deepep_v2 expands rows"),
    "one_owner_of_the_reduction": ({"moe.reduce": "all_reduce"}, "would sum again"),
    "shared_expert_shards_are_summed": ({"moe.shared_experts": "tp_sharded"}, "nothing sums"),
    "local_shared_expert_precedes_a_gather": ({"moe.shared_experts": "local"}, "before a DP"),
    "deepep_v2_expands_into_slabs": (
        V2 | {"batch.phase": "decode", "moe.layout": "compact"},
        "'compact', but deepep_v2 expanded is 'masked'",
    ),
    "deepep_v2_expands_in_decode": (V2 | {"moe.expanded": True}, "expands in decode alone"),
    "flashinfer_wants_attention_dp_alone": (FLASHINFER | TP2, "flashinfer with pure TP"),
    "deepep_v2_takes_the_recipe": (V2 | {"moe.recipe": "mxfp4_w4a8"}, "rejects fp4 experts"),
    "recipe_has_kernels_on_platform": (
        {"moe.recipe": "mxfp8", "platform": "sm120"},
        "recipe mxfp8 has no DeepGEMM kernels on sm120 (native there: bf16, fp8_block128, mxfp4",
    ),
    "recipe_has_its_scales_on_platform": (
        {"moe.recipe": "mxfp4_w4a8", "platform": "sm90"},
        "mxfp4_w4a8 has power-of-two scales, sm90's GEMMs read fp32: use platform sm100 or sm120",
    ),
    "fp32_is_kept_for_deepep_v2_with_mxfp8": (
        V2 | {KEEP_FP32: True},
        "is set for deepep_v2 with mxfp8 alone, this is deepep_v2 with fp8_block128",
    ),
    "fp32_is_kept_of_silu": (
        V2 | KIMI_K3 | MXFP8 | {KEEP_FP32: True},
        "is about silu, kimi_k3 has situ",
    ),
    "padded_experts_are_whole": (
        GPT_OSS | STANDARD | {"moe.recipe": "mxfp4_w4a8", "parallel.moe": {"ep": 1, "tp": 2}},
        "moe tp(2) would cut experts that are padded to multiples of 256",
    ),
    "deepep_v2_takes_silu": (V2 | KIMI_K3, "deepep_v2 asserts silu; kimi_k3 has situ"),
    "top_k_fits_the_experts": (
        {"model.overrides.num_experts_per_tok": 9},
        "num_experts_per_tok(9) > n_routed_experts(8)",
    ),
    "groups_fit_the_experts": (
        {"model.overrides.n_group": 3},
        "n_routed_experts(8) is not divisible by n_group(3)",
    ),
    "every_rank_has_an_expert": (
        {"model.overrides.n_routed_experts": 1, "model.overrides.num_experts_per_tok": 1},
        "2 expert-parallel ranks for 1 experts",
    ),
    "experts_divide_over_ranks": (
        {"moe.redundant_experts": 1},
        "n_routed_experts(8) + redundant_experts(1) = 9 is not divisible by moe ep(2)",
    ),
    "intermediate_divides_over_ranks": (
        STANDARD | {"parallel.moe": {"ep": 1, "tp": 2}, "model.overrides.moe_intermediate_size": 3},
        "moe_intermediate_size(3) is not divisible by moe tp(2)",
    ),
    "quantisation_groups_are_whole": (
        STANDARD | {"parallel.moe": {"ep": 1, "tp": 2}},
        "split: moe_intermediate_size(128) / moe tp(2) = 64 into 128s",
    ),
    "shards_of_the_shared_expert_are_whole": (
        STANDARD,
        "shared_intermediate_size(128) / world_size(2) = 64, and fp8_block128 needs whole groups",
    ),
    "a_made_routing_fits_the_layer": (
        {"batch.routing": {"kind": "one_rank"}},
        "'one_rank' gives a token 6 experts of 4 on a rank",
    ),
    "slots_have_such_a_padding": (
        CP2 | {"batch.padding": "max_len"},
        "padding max_len: slots are padded between attention-DP groups, dp is 1",
    ),
    "groups_of_an_fp8_gather_are_whole": (
        STANDARD
        | WHOLE_SHARED
        | {
            "moe.recipe": "bf16",
            "model.overrides.hidden_size": 192,
            "moe.switches": {"dp_gather_fp8": True},
        },
        "hidden_size(192) does not split into the fp8 wire's groups of 128",
    ),
    "a_hash_layer_exists": (
        {"model": {"preset": "glm4_moe", "layer": "hash_moe"}},
        "hash_moe, but glm4_moe has no hash layers",
    ),
    "flashinfer_has_a_tree_for_top_k": (
        FLASHINFER | {"model.overrides.num_experts_per_tok": 7, "batch.phase": "decode"},
        "it has no tree for 7",
    ),
    "model_is_registered_with_deepep_v2": (
        V2 | {"model": {"preset": "mixtral"}},
        "mixtral is not registered with deepep_v2",
    ),
    "deepep_ll_hidden_sizes": (LL, "hidden_size(256) is none of deepep_ll's 2048, 2560"),
    "deepep_ll_packs_scales_in_fours": (LL, "hidden_size(256) is not divisible by 512"),
    "slab_scales_come_in_fours": (LL, "(I / g) % 4 != 0 with I = 128 a rank, g = 128"),
    "clamping_kernel_threads": (LL, "the clamping kernel wants I % 256 == 0"),
    "clamped_rows_may_lie_in_slabs": (
        STANDARD | {"moe.layout": "masked"},
        "wants I % 512 == 0, I is 128: SGLang takes compact although masked is asked for",
    ),
    "slabs_are_whole_tiles": (
        LL | {"moe.switches.max_dispatch_tokens_per_rank": 16},
        "slabs of 32 rows (2 ranks x 16): DeepGEMM's masked kernels write whole tiles of 64 rows",
    ),
    "ep_gather_width": (
        {"moe.recipe": "bf16", "model.overrides.hidden_size": 200},
        "ep_gather wants hidden_size(200) to be a multiple of 128",
    ),
    "quantise_and_scatter_width": (
        STANDARD | {"moe.layout": "masked"},
        "the quantise-and-scatter kernel wants hidden_size(256) % 512 == 0",
    ),
}

KERNEL_SIZES = {"model.overrides.hidden_size": 2048, "model.overrides.moe_intermediate_size": 512}

# What a rule must let pass: the nearest neighbours of what it refuses.
RIGHT_NEIGHBOURS = {
    "attention-tp": STANDARD | WHOLE_SHARED | TP2,
    "cp-standard": STANDARD | WHOLE_SHARED | CP2,
    "cp-normal": CP2,
    "moe-tp-standard": STANDARD | MOE_TP2,
    "full-buffer": LL | {"batch.tokens": [128, 0]},
    "full-buffer-split-over-tp": LL | TP2 | {"batch.tokens": [256]},
    "raised-capacity": LL | {"batch.tokens": [1024, 0], ROWS: 1024},
    "flashinfer-prefill-gathers": FLASHINFER | {"batch.tokens": [4097, 0]},
    "normal-has-no-cap": {"batch.tokens": [4096, 0]},
    "compact-normal": {"moe.layout": "compact"},
    "masked-ll": LL | {"moe.layout": "masked"},
    "v2-decode-masked": V2 | {"batch.phase": "decode", "moe.layout": "masked"},
    "v2-extend-compact": V2 | {"moe.layout": "compact"},
    "v2-decode-expanded-in-place": V2
    | {"batch.phase": "decode", "moe.layout": "compact", "allow_unsupported": True},
    "v2-decode-not-expanded-compact": V2
    | {
        "batch.phase": "decode",
        "moe.layout": "compact",
        "moe.expanded": False,
        "allow_unsupported": True,
    },
    "v2-decode-expanded": V2 | {"batch.phase": "decode", "moe.expanded": True},
    "standard-reduce": STANDARD | WHOLE_SHARED | {"moe.reduce": "reduce_scatter_v"},
    "standard-shared": STANDARD
    | {"moe.shared_experts": "tp_sharded", "model.overrides.moe_intermediate_size": 256},
    "standard-shared-bf16": STANDARD | {"moe.recipe": "bf16"},
    "standard-no-shared": STANDARD | {"model.overrides.n_shared_experts": 0},
    "standard-local": STANDARD | {"moe.shared_experts": "local"},
    "flashinfer": FLASHINFER,
    "flashinfer-top-8": FLASHINFER
    | {"model.overrides.num_experts_per_tok": 8, "batch.phase": "decode"},
    "flashinfer-prefill-top-7": FLASHINFER | {"model.overrides.num_experts_per_tok": 7},
    "redundant": {"moe.redundant_experts": 2},
    "odd-sizes-in-bf16": {"moe.recipe": "bf16", "model.overrides.hidden_size": 200},
    "hash-layer": {"model.layer": "hash_moe"},
    "mxfp8-sm100": MXFP8,
    "mxfp8-odd-hidden-standard": STANDARD | WHOLE_SHARED | MXFP8 | GROUPS_OF_32,
    "mxfp8-odd-hidden-bf16-wire": MXFP8
    | GROUPS_OF_32
    | {"moe.switches.deepep_bf16_dispatch": True},
    "mxfp8-odd-hidden-v2": V2 | MXFP8 | GROUPS_OF_32,
    "mxfp8-shared-in-32s": STANDARD | MXFP8,
    "mxfp8-moe-tp": STANDARD | MXFP8 | {"parallel.moe": {"ep": 1, "tp": 2}},
    "mxfp8-v2-fp32-kept": V2 | MXFP8 | {KEEP_FP32: True},
    "mxfp4-padded": GPT_OSS | {"moe.recipe": "mxfp4_w4a8"},
    "mxfp4-as-fp8-padded-sm90": GPT_OSS | {"moe.recipe": "mxfp4_as_fp8", "platform": "sm90"},
    "mxfp4-padded-from-whole-groups": GPT_OSS
    | {
        "moe.recipe": "mxfp4_w4a8",
        "model.overrides": {"hidden_size": 96, "intermediate_size": 160},
    },
    "mxfp4-as-fp8-v2": V2 | {"moe.recipe": "mxfp4_as_fp8"},
    "per-tensor-sm90": {"moe.recipe": "fp8_per_tensor", "platform": "sm90"},
    "situ": KIMI_K3 | {"moe.recipe": "mxfp4_w4a8"},
    "sm120": STANDARD | WHOLE_SHARED | {"platform": "sm120"},
    "sm120-bf16": STANDARD | WHOLE_SHARED | {"platform": "sm120", "moe.recipe": "bf16"},
    "mxfp4-sm120": {"moe.recipe": "mxfp4_w4a8", "platform": "sm120"},
    "one-rank": {
        "batch.routing": {"kind": "one_rank"},
        "model.overrides.num_experts_per_tok": 4,
    },
    "ties": {"batch.routing": {"kind": "ties"}},
    "hashed-balanced": {"model.layer": "hash_moe", "batch.routing": {"kind": "balanced"}},
    "expected-mode": {"expect": {"verdict": "discrepancy", "stage": "gemm1", "mode": "random"}},
    "loopback": {"run.runtime": "loopback", "run.backends.transport": "loopback"},
    "strict-ll": LL | KERNEL_SIZES | {"moe.strict_shapes": True},
    "strict-standard-masked": STANDARD
    | WHOLE_SHARED
    | KERNEL_SIZES
    | {"moe.layout": "masked", "moe.strict_shapes": True},
    "strict-normal": KERNEL_SIZES | {"moe.strict_shapes": True},
    "strict-v2-decode": V2 | KERNEL_SIZES | {"batch.phase": "decode", "moe.strict_shapes": True},
}

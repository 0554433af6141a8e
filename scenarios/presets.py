"""Published models by name: of each config.json, the keys that a MoE layer reads, as published."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from scenarios.models import MoeModel, model_from_config


class Preset(StrEnum):
    """The models that a scenario can name instead of a config.json."""

    DEEPSEEK_V4 = "deepseek_v4"
    DEEPSEEK_V3 = "deepseek_v3"
    QWEN3_MOE = "qwen3_moe"
    GLM4_MOE = "glm4_moe"
    MINIMAX_M2 = "minimax_m2"
    MIXTRAL = "mixtral"
    KIMI_K2 = "kimi_k2"
    GPT_OSS = "gpt_oss"
    KIMI_K3 = "kimi_k3"


PRESET_SOURCES: Final[Mapping[Preset, str]] = MappingProxyType(
    {
        Preset.DEEPSEEK_V4: "deepseek-ai/DeepSeek-V4-Flash config.json",
        Preset.DEEPSEEK_V3: "deepseek-ai/DeepSeek-V3 config.json",
        Preset.QWEN3_MOE: "Qwen/Qwen3-30B-A3B config.json",
        Preset.GLM4_MOE: "zai-org/GLM-4.5 config.json",
        Preset.MINIMAX_M2: "MiniMaxAI/MiniMax-M2 config.json",
        Preset.MIXTRAL: "mistralai/Mixtral-8x7B-v0.1 config.json",
        Preset.KIMI_K2: "moonshotai/Kimi-K2-Instruct config.json",
        Preset.GPT_OSS: "openai/gpt-oss-20b config.json",
        Preset.KIMI_K3: "moonshotai/Kimi-K3 config.json, text_config",
    }
)

PRESET_CONFIGS: Final[Mapping[Preset, Mapping[str, object]]] = MappingProxyType(
    {
        # Same values as the defaults of transformers DeepseekV4Config.
        Preset.DEEPSEEK_V4: {
            "model_type": "deepseek_v4",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 6,
            "num_hash_layers": 3,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": 10.0,
            "topk_method": "noaux_tc",
            "vocab_size": 129280,
        },
        # Same values as the defaults of transformers and vLLM DeepseekV3Config.
        Preset.DEEPSEEK_V3: {
            "model_type": "deepseek_v3",
            "hidden_act": "silu",
            "hidden_size": 7168,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "vocab_size": 129280,
        },
        # The file says nothing of scoring: transformers Qwen3MoeTopKRouter is a softmax.
        Preset.QWEN3_MOE: {
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
        },
        # The file says nothing of scoring: transformers Glm4MoeTopkRouter is sigmoid + bias.
        Preset.GLM4_MOE: {
            "model_type": "glm4_moe",
            "hidden_act": "silu",
            "hidden_size": 5120,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "topk_group": 1,
            "vocab_size": 151552,
        },
        # `intermediate_size` is the expert's width. Weights are always renormalised:
        # transformers MiniMaxM2TopKRouter.
        Preset.MINIMAX_M2: {
            "model_type": "minimax_m2",
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "use_routing_bias": True,
            "vocab_size": 200064,
        },
        # `intermediate_size` is the expert's width; softmax, renormalised over the chosen two.
        Preset.MIXTRAL: {
            "model_type": "mixtral",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "vocab_size": 32000,
        },
        Preset.KIMI_K2: {
            "model_type": "kimi_k2",
            "hidden_act": "silu",
            "hidden_size": 7168,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.827,
            "scoring_func": "sigmoid",
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "vocab_size": 163840,
        },
        # `hidden_act` notwithstanding, its experts clamp and weigh otherwise, and the router is a
        # softmax over the chosen logits: transformers GptOssExperts, GptOssTopKRouter.
        Preset.GPT_OSS: {
            "model_type": "gpt_oss",
            "hidden_act": "silu",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_experts_per_tok": 4,
            "num_local_experts": 32,
            "swiglu_limit": 7.0,
            "vocab_size": 201088,
        },
        # Of this latent MoE the routed experts, in their own width: SGLang, models/kimi_k3.py.
        Preset.KIMI_K3: {
            "model_type": "kimi_linear",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "hidden_act": "situ",
            "hidden_size": 7168,
            "moe_intermediate_size": 3072,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "routed_expert_hidden_size": 3584,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "vocab_size": 163840,
        },
    }
)

PRESETS: Final[Mapping[Preset, MoeModel]] = MappingProxyType(
    {
        preset: model_from_config(config, name=preset.value)
        for preset, config in PRESET_CONFIGS.items()
    }
)

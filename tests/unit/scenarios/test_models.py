import json
from pathlib import Path
from typing import Any

import pytest

from moe.formats import ActivationKind, GatedActivation, ScoringFunc
from scenarios.families import FAMILIES
from scenarios.models import CONFIG_NAMES, ModelError, model_from_config
from scenarios.presets import PRESET_SOURCES, PRESETS, Preset

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


def published(family: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{family}.json").read_text())


GENERIC = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "vocab_size": 100,
}


SWIGLUOAI = {**GENERIC, "hidden_act": "swigluoai"}
SITU = {
    **GENERIC,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
}
LATENT = {**GENERIC, "routed_expert_hidden_size": 16, "num_shared_experts": 2}


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v4",
        "glm4_moe",
        "gpt_oss",
        "kimi_k2",
        "kimi_k3",
        "minimax_m2",
        "mixtral",
        "qwen3_moe",
    ],
)
def test_an_unmodified_published_config_gives_the_preset(family):
    assert model_from_config(published(family), name=family) == PRESETS[Preset(family)]


def test_every_preset_says_where_it_comes_from():
    assert set(PRESET_SOURCES) == set(PRESETS) == set(Preset)


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("deepseek_v4", (4096, 2048, 256, 6, 1.5, 2048)),
        ("deepseek_v3", (7168, 2048, 256, 8, 2.5, 2048)),
        ("qwen3_moe", (2048, 768, 128, 8, 1.0, 0)),
        ("glm4_moe", (5120, 1536, 160, 8, 2.5, 1536)),
        ("minimax_m2", (3072, 1536, 256, 8, 1.0, 0)),
        ("mixtral", (4096, 14336, 8, 2, 1.0, 0)),
        ("kimi_k2", (7168, 2048, 384, 8, 2.827, 2048)),
        ("gpt_oss", (2880, 2880, 32, 4, 1.0, 0)),
        ("kimi_k3", (3584, 3072, 896, 16, 1.0, 0)),
    ],
)
def test_preset_sizes_are_the_published_ones(preset, sizes):
    model = PRESETS[Preset(preset)]
    assert sizes == (
        model.hidden_size,
        model.moe_intermediate_size,
        model.n_routed_experts,
        model.num_experts_per_tok,
        model.routed_scaling_factor,
        model.shared_intermediate_size,
    )


@pytest.mark.parametrize(
    ("preset", "router"),
    [
        ("deepseek_v4", (ScoringFunc.SQRTSOFTPLUS, True, 1, 1, 10.0)),
        ("deepseek_v3", (ScoringFunc.SIGMOID, True, 8, 4, None)),
        ("qwen3_moe", (ScoringFunc.SOFTMAX, False, 1, 1, None)),
        ("glm4_moe", (ScoringFunc.SIGMOID, True, 1, 1, None)),
        ("minimax_m2", (ScoringFunc.SIGMOID, True, 1, 1, None)),
        ("mixtral", (ScoringFunc.SOFTMAX, False, 1, 1, None)),
        ("kimi_k2", (ScoringFunc.SIGMOID, True, 1, 1, None)),
        ("gpt_oss", (ScoringFunc.SOFTMAX, False, 1, 1, None)),
        ("kimi_k3", (ScoringFunc.SIGMOID, True, 1, 1, None)),
    ],
)
def test_preset_routers_are_the_published_ones(preset, router):
    model = PRESETS[Preset(preset)]
    assert model.norm_topk_prob is True
    assert router == (
        model.scoring_func,
        model.correction_bias,
        model.n_group,
        model.topk_group,
        model.swiglu_limit,
    )


@pytest.mark.parametrize(
    ("preset", "activation"),
    [
        ("deepseek_v4", GatedActivation(limit=10.0)),
        ("mixtral", GatedActivation()),
        ("kimi_k2", GatedActivation()),
        ("gpt_oss", GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702, limit=7.0)),
        ("kimi_k3", GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)),
    ],
)
def test_preset_activations_are_the_published_ones(preset, activation):
    assert PRESETS[Preset(preset)].activation == activation


@pytest.mark.parametrize("experts", ["n_routed_experts", "num_experts", "num_local_experts"])
@pytest.mark.parametrize("top_k", ["num_experts_per_tok", "num_experts_per_token", "moe_top_k"])
def test_generic_names_are_read(experts, top_k):
    config = {k: v for k, v in GENERIC.items() if not k.startswith("num_experts")}
    model = model_from_config({**config, experts: 4, top_k: 2})
    assert (model.n_routed_experts, model.num_experts_per_tok) == (4, 2)


def test_intermediate_size_is_the_experts_only_without_a_moe_intermediate_size():
    assert model_from_config({**GENERIC, "intermediate_size": 999}).moe_intermediate_size == 32


@pytest.mark.parametrize("section", ["text_config", "language_config", "llm_config"])
def test_a_nested_language_model_is_found(section):
    nested = {"model_type": "some_vlm", "hidden_size": 5, section: GENERIC}
    assert model_from_config(nested).hidden_size == 64


def test_a_shared_width_without_a_count_is_one_gated_expert_in_qwen2_moe():
    config = {**GENERIC, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 96}
    model = model_from_config(config)
    assert (model.n_shared_experts, model.shared_intermediate_size) == (1, 96)
    assert model.shared_expert_gate is True


def test_shared_experts_without_a_width_are_as_wide_as_the_routed_ones():
    assert model_from_config({**GENERIC, "n_shared_experts": 2}).shared_intermediate_size == 64


@pytest.mark.parametrize(
    ("method", "bias"), [("noaux_tc", True), ("greedy", False), ("group_limited_greedy", False)]
)
def test_of_the_topk_methods_noaux_tc_alone_has_a_bias(method, bias):
    assert model_from_config({**GENERIC, "topk_method": method}).correction_bias is bias


def test_a_dense_config_is_refused_naming_what_is_missing():
    dense = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008}
    with pytest.raises(ModelError, match="no MoE: none of n_routed_experts, num_experts, num_loc"):
        model_from_config(dense)


def test_every_missing_value_is_named_at_once():
    with pytest.raises(ModelError) as caught:
        model_from_config({"num_experts": 4})
    assert [key for key, _ in caught.value.faults] == [
        "hidden_size",
        "moe_intermediate_size",
        "num_experts_per_tok",
        "scoring_func",
        "norm_topk_prob",
        "vocab_size",
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_size", 0, "whole number >= 1"),
        ("hidden_size", True, "whole number"),
        ("num_experts_per_tok", [2, 2], "whole number"),
        ("num_experts", 4.0, "whole number"),
        ("norm_topk_prob", 1, "true or false"),
        ("routed_scaling_factor", float("nan"), "number > 0 that fp32 holds"),
        ("routed_scaling_factor", 1.0e39, "number > 0 that fp32 holds"),
        ("routed_scaling_factor", 1.0e-39, "number > 0 that fp32 holds"),
        ("routed_scaling_factor", True, "number > 0 that fp32 holds"),
        ("swiglu_limit", "10", "number > 0 that fp32 holds"),
        ("scoring_func", "softmx", "did you mean 'softmax'"),
        ("hidden_act", 3, "text"),
    ],
)
def test_an_ill_typed_value_is_refused(key, value, message):
    with pytest.raises(ModelError, match=message):
        model_from_config({**GENERIC, key: value})


@pytest.mark.parametrize(
    ("changes", "alpha", "limit"),
    [
        ({}, 1.702, None),
        ({"swiglu_alpha": 2.0, "swiglu_limit": 7.0}, 2.0, 7.0),
        ({"hidden_act": "silu", "model_type": "gpt_oss"}, 1.702, None),
        ({"hidden_act": "silu", "model_type": "minimax_m3_vl_text"}, 1.702, None),
    ],
    ids=["by name", "with parameters", "gpt_oss says silu", "minimax_m3 says silu"],
)
def test_an_alpha_scaled_swiglu_is_read(changes, alpha, limit):
    activation = model_from_config({**SWIGLUOAI, **changes}).activation
    assert activation == GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=alpha, limit=limit)


def test_a_situ_is_read():
    expected = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)
    assert model_from_config(SITU).activation == expected


@pytest.mark.parametrize("key", ["activation_situ_beta", "activation_situ_linear_beta"])
def test_a_situ_without_a_beta_is_refused(key):
    with pytest.raises(ModelError, match=f"{key}: missing"):
        model_from_config({**SITU, key: None})


@pytest.mark.parametrize("limited", [{**SWIGLUOAI, "swiglu_limit": 7.0}, SITU], ids=["oai", "situ"])
def test_the_clamp_of_a_silu_is_none_of_another_activation(limited):
    assert model_from_config(limited).swiglu_limit is None


def test_the_clamp_of_a_silu_is_its_limit():
    assert model_from_config({**GENERIC, "swiglu_limit": 10}).swiglu_limit == 10.0


def test_an_unknown_hidden_act_keeps_its_name():
    assert model_from_config({**GENERIC, "hidden_act": "gelu"}).hidden_act == "gelu"


def test_a_latent_moe_is_as_wide_as_its_routed_experts():
    model = model_from_config(LATENT)
    assert (model.hidden_size, model.outer_hidden_size) == (16, 64)


def test_shared_experts_outside_the_latent_width_are_left_out():
    model = model_from_config(LATENT)
    assert (model.n_shared_experts, model.shared_intermediate_size) == (0, 0)


@pytest.mark.parametrize("width", [65, 0, True, "16"])
def test_a_latent_width_beyond_the_models_is_refused(width):
    with pytest.raises(ModelError, match=r"a width within hidden_size\(64\)"):
        model_from_config({**LATENT, "routed_expert_hidden_size": width})


@pytest.mark.parametrize(("family", "step"), [("gpt_oss", 256), ("qwen3_moe", None)])
def test_a_family_says_what_its_sizes_are_padded_to(family, step):
    assert model_from_config({**GENERIC, "model_type": family}).pads_to == step


@pytest.mark.parametrize(("family", "biases"), [("gpt_oss", True), ("qwen3_moe", False)])
def test_a_family_says_whether_it_has_biases(family, biases):
    assert model_from_config({**GENERIC, "model_type": family}).has_biases is biases


@pytest.mark.parametrize("family", ["llama4", "llama4_text"])
def test_a_family_with_another_formula_is_refused(family):
    with pytest.raises(ModelError, match="computes another formula"):
        model_from_config({**GENERIC, "model_type": family})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_implies_is_named_as_our_fields_are(family):
    assert set(FAMILIES[family].implies) <= set(CONFIG_NAMES)

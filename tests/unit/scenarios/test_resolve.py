import json

import pytest

from scenarios.models import ModelError
from scenarios.presets import PRESETS, Preset
from scenarios.resolve import resolve_model
from scenarios.schema import ModelSpec


def resolve(tmp_path, **spec):
    return resolve_model(ModelSpec.model_validate_json(json.dumps(spec)), tmp_path)


def faults(tmp_path, **spec):
    with pytest.raises(ModelError) as caught:
        resolve(tmp_path, **spec)
    return dict(caught.value.faults)


def test_a_preset_without_overrides_is_itself(tmp_path):
    assert resolve(tmp_path, preset="glm4_moe") == PRESETS[Preset.GLM4_MOE]


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts"])
def test_an_override_takes_the_models_name_or_ours(tmp_path, name):
    assert resolve(tmp_path, preset="qwen3_moe", overrides={name: 16}).n_routed_experts == 16


def test_the_shared_width_follows_an_overridden_expert_width(tmp_path):
    model = resolve(tmp_path, preset="deepseek_v4", overrides={"moe_intermediate_size": 256})
    assert model.shared_intermediate_size == 256


def test_null_removes_a_clamp(tmp_path):
    model = resolve(tmp_path, preset="deepseek_v4", overrides={"swiglu_limit": None})
    assert model.swiglu_limit is None


def test_the_bias_can_be_switched_off_under_either_name(tmp_path):
    ours = resolve(tmp_path, preset="deepseek_v4", overrides={"correction_bias": False})
    theirs = resolve(tmp_path, preset="deepseek_v4", overrides={"topk_method": "greedy"})
    assert ours == theirs
    assert ours.correction_bias is False


def test_an_override_typo_names_its_nearest_match(tmp_path):
    found = faults(tmp_path, preset="deepseek_v4", overrides={"hiden_size": 512})
    assert "did you mean 'hidden_size'?" in found["overrides.hiden_size"]


def test_another_models_name_is_answered_with_this_models(tmp_path):
    found = faults(tmp_path, preset="deepseek_v4", overrides={"num_experts": 8})
    assert "did you mean 'n_routed_experts'?" in found["overrides.num_experts"]


def test_a_dense_width_is_no_override_of_the_experts(tmp_path):
    found = faults(tmp_path, preset="deepseek_v4", overrides={"intermediate_size": 512})
    assert "did you mean 'moe_intermediate_size'?" in found["overrides.intermediate_size"]


def test_one_field_cannot_be_overridden_under_two_names(tmp_path):
    overrides = {"num_experts": 8, "n_routed_experts": 8}
    found = faults(tmp_path, preset="qwen3_moe", overrides=overrides)
    assert "keep one" in found["overrides.n_routed_experts"]


def test_wrong_names_and_wrong_types_are_reported_together(tmp_path):
    overrides = {"hiden_size": 512, "moe_intermediate_size": "wide"}
    found = faults(tmp_path, preset="deepseek_v4", overrides=overrides)
    assert set(found) == {"overrides.hiden_size", "overrides.moe_intermediate_size"}


def test_a_config_json_is_read_from_the_scenarios_folder(tmp_path):
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve(tmp_path, hf_config="config.json").moe_intermediate_size == 32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"{", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b"[]", "holds no JSON object"),
        (b'{"hidden_size": 64}', "no MoE"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=["missing", "cut", "not-utf8", "list", "dense", "deep"],
)
def test_a_bad_config_json_is_one_clear_fault(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert message in faults(tmp_path, hf_config="config.json")["hf_config"]

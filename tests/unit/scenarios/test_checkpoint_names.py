from pathlib import Path

import pytest

from scenarios.checkpoint_files import CheckpointError
from scenarios.checkpoint_names import all_spellings, find_layer

CHECKPOINT = Path("ckpt.safetensors")


def found(*names, layer=3):
    return find_layer(dict.fromkeys(names, CHECKPOINT), layer, CHECKPOINT)


def problems(*names, layer=3):
    with pytest.raises(CheckpointError) as caught:
        found(*names, layer=layer)
    return [(problem.tensor, problem.message) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("full", "name"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", "experts.7.up_proj.weight"),
        ("layers.3.ffn.experts.7.w3.weight", "experts.7.up_proj.weight"),
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "experts.7.gate_proj.weight"),
        (
            "model.layers.3.mlp.experts.7.w2.weight_scale_inv",
            "experts.7.down_proj.weight_scale_inv",
        ),
        ("model.layers.3.mlp.shared_expert.up_proj.weight", "shared_experts.up_proj.weight"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts.gate_up_proj"),
        ("model.layers.3.mlp.e_score_correction_bias", "gate.e_score_correction_bias"),
        ("layers.3.ffn.gate.bias", "gate.e_score_correction_bias"),
        ("language_model.model.layers.3.mlp.gate.weight", "gate.weight"),
        ("layers.3.ffn.gate.tid2eid", "gate.tid2eid"),
        ("layers.3.ffn.experts.7.w1.scale", "experts.7.gate_proj.weight_scale_inv"),
        (
            "model.layers.3.block_sparse_moe.experts.7.w2.weight_scale",
            "experts.7.down_proj.weight_scale_inv",
        ),
        (
            "language_model.model.layers.3.block_sparse_moe.experts.7.w3.weight_packed",
            "experts.7.up_proj.weight",
        ),
        ("model.layers.3.mlp.experts.gate_up_proj_blocks", "experts.gate_up_proj_blocks"),
        ("model.layers.3.mlp.router.weight", "gate.weight"),
    ],
)
def test_every_family_has_one_name_for_a_tensor(full, name):
    assert found(full).names == {name: full}


@pytest.mark.parametrize(
    "other",
    [
        "model.layers.13.mlp.experts.0.up_proj.weight",
        "model.layers.33.mlp.experts.0.up_proj.weight",
        "model.layers.30.mlp.experts.0.up_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "vision_tower.encoder.layers.3.mlp.fc1.weight",
    ],
)
def test_other_parts_of_the_model_are_no_candidates(other):
    wanted = "model.layers.3.mlp.experts.0.up_proj.weight"
    assert found(wanted, other).names == {"experts.0.up_proj.weight": wanted}


def test_the_prefix_is_what_the_names_share():
    assert found("a.layers.3.ffn.gate.weight").prefix == "a.layers.3.ffn"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("model.layers.3.mlp.gate.weight", "model.layers.3.ffn.gate.weight"),
        ("language_model.model.layers.3.mlp.gate.weight", "model.layers.3.mlp.gate.weight"),
    ],
    ids=["mlp-ffn", "nested"],
)
def test_two_prefixes_are_an_error_that_lists_both(one, two):
    message = "one of several candidates for layer 3; wanted one prefix"
    assert sorted(problems(one, two)) == sorted([(one, message), (two, message)])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("experts.0.gate_proj.weight", "experts.0.w1.weight"),
        ("shared_expert.up_proj.weight", "shared_experts.up_proj.weight"),
        ("e_score_correction_bias", "gate.e_score_correction_bias"),
        ("experts.0.gate_proj.weight", "experts.0.gate_proj.weight_packed"),
        ("experts.0.gate_proj.scale", "experts.0.gate_proj.weight_scale_inv"),
        ("experts.0.gate_proj.weight", "experts.gate_up_proj"),
        ("experts.gate_up_proj", "experts.gate_up_proj_blocks"),
    ],
    ids=["w1", "shared", "bias", "packed", "scale", "fused", "blocked"],
)
def test_two_names_for_the_same_weights_are_an_error_that_lists_both(one, two):
    message = "one of several names for the same weights; wanted one"
    names = [f"model.layers.3.mlp.{name}" for name in (one, two)]
    assert problems(*names) == [(name, message) for name in names]


def test_no_such_layer_names_the_layers_that_have_experts():
    names = [f"model.layers.{layer}.mlp.experts.0.up_proj.weight" for layer in (13, 4)]
    assert problems(*names) == [
        (
            "*layers.3.(mlp|ffn|block_sparse_moe).experts.*",
            "no such tensor; layers with experts: 4, 13",
        )
    ]


def test_a_dense_layer_is_refused_with_what_it_holds():
    ((_, message),) = problems("model.layers.3.mlp.up_proj.weight")
    assert message == (
        "no such tensor; of that layer it holds model.layers.3.mlp.up_proj.weight; "
        "no layer has experts"
    )


def test_a_wanted_name_is_shown_in_every_family():
    assert all_spellings("experts.0.up_proj.weight") == "experts.0.(up_proj|w3).weight"
    assert all_spellings("shared_experts.down_proj.weight_scale_inv") == (
        "(shared_experts|shared_expert).(down_proj|w2).(weight_scale_inv|weight_scale|scale)"
    )

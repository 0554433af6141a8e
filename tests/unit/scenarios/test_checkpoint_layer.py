import pytest

from moe.formats import QuantRecipe
from scenarios.checkpoint_files import StoredTensor
from scenarios.checkpoint_layer import fit_layer
from scenarios.checkpoint_names import LayerNames
from scenarios.models import model_from_config

CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "vocab_size": 1000,
}
BIAS = "gate.e_score_correction_bias"
UP = "experts.1.up_proj.weight"
SHARED_DOWN = "shared_experts.down_proj.weight"
BF16, FP8 = QuantRecipe.BF16, QuantRecipe.FP8_BLOCK128
PER_TENSOR, MXFP8 = QuantRecipe.FP8_PER_TENSOR, QuantRecipe.MXFP8
W4A8, FP4_AS_FP8 = QuantRecipe.MXFP4_W4A8, QuantRecipe.MXFP4_AS_FP8
SHAPES = {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}
BF16_FORM = ("BF16", 1, None, {})
BLOCKS = ("F8_E4M3", 1, "F32", {"gate_proj": (1, 2), "up_proj": (1, 2), "down_proj": (2, 1)})
ONE_SCALE = ("F8_E4M3", 1, "F32", dict.fromkeys(SHAPES, ()))
GROUPS = {"gate_proj": (128, 8), "up_proj": (128, 8), "down_proj": (256, 4)}
FORMS = {
    BF16: (BF16_FORM, BF16_FORM),
    FP8: (BLOCKS, BLOCKS),
    PER_TENSOR: (ONE_SCALE, ONE_SCALE),
    MXFP8: (("F8_E4M3", 1, "U8", GROUPS),) * 2,
    W4A8: (("I8", 2, "F8_E8M0", GROUPS), BLOCKS),
    FP4_AS_FP8: (("U8", 2, "U8", GROUPS), BLOCKS),
}
"""Recipe -> dtype, values an element, scale's dtype and shapes: of routed experts, of shared."""


def headers(recipe):
    """Name -> (shape, dtype) of a checkpoint that fits."""
    layer = {"gate.weight": ((2, 256), "BF16"), BIAS: ((2,), "F32")}
    routed, shared = FORMS[recipe]
    owners = {"experts.0": routed, "experts.1": routed, "shared_experts": shared}
    for owner, (dtype, packed, scale_dtype, scale_shapes) in owners.items():
        for part, (rows, columns) in SHAPES.items():
            layer[f"{owner}.{part}.weight"] = ((rows, columns // packed), dtype)
            if scale_dtype:
                layer[f"{owner}.{part}.weight_scale_inv"] = (scale_shapes[part], scale_dtype)
    return layer


def problems(recipe, *, without=(), more=(), hashed=False, **config):
    """(name, message) of every problem after leaving tensors out and adding or replacing some."""
    layer = {n: header for n, header in headers(recipe).items() if n not in without} | dict(more)
    stored = {
        f"p.{name}": StoredTensor(file="f", name=f"p.{name}", shape=shape, dtype=dtype)
        for name, (shape, dtype) in layer.items()
    }
    names = LayerNames(prefix="p", names={name: f"p.{name}" for name in layer})
    model = model_from_config(CONFIG | config)
    _, found = fit_layer(names, stored, model, recipe, hashed=hashed)
    return [(problem.tensor, problem.message) for problem in found]


@pytest.mark.parametrize("recipe", FORMS)
def test_a_checkpoint_that_fits_has_no_problem(recipe):
    assert problems(recipe) == []


@pytest.mark.parametrize(
    ("recipe", "name"),
    [(FP8, UP), (FP8, SHARED_DOWN), (PER_TENSOR, UP), (W4A8, SHARED_DOWN)],
)
def test_bf16_under_a_recipe_that_quantises_it_has_no_problem(recipe, name):
    shape = headers(BF16)[name][0]
    without = [f"{name}_scale_inv"]
    assert problems(recipe, without=without, more=[(name, (shape, "BF16"))]) == []


def test_bf16_experts_under_mxfp8_have_no_problem():
    scales = [name for name in headers(MXFP8) if name.endswith("_scale_inv")]
    assert problems(MXFP8, without=scales, more=headers(BF16).items()) == []


def test_a_bf16_expert_among_mxfp8_ones_is_refused():
    without = [f"{UP}_scale_inv"]
    assert problems(MXFP8, without=without, more=[(UP, ((128, 256), "BF16"))]) == [
        (f"p.{UP}", "BF16 beside experts in F8_E4M3; wanted one for all")
    ]


def test_bf16_experts_under_an_mxfp4_recipe_name_the_recipes_that_read_them():
    without = [f"{UP}_scale_inv"]
    assert problems(W4A8, without=without, more=[(UP, ((128, 256), "BF16"))]) == [
        (
            f"p.{UP}",
            "[128, 256] BF16 was read; wanted [128, 128] I8 or U8; experts in BF16 are for "
            "moe.recipe bf16 or fp8_block128 or fp8_per_tensor or mxfp8",
        )
    ]


CAST = "nothing is cast at load, convert the checkpoint first"


@pytest.mark.parametrize(
    ("recipe", "name", "header", "message"),
    [
        (BF16, UP, ((128, 128), "BF16"), "[128, 128] BF16 was read; wanted [128, 256] BF16"),
        (BF16, UP, ((128, 256), "F32"), f"[128, 256] F32 was read; wanted [128, 256] BF16; {CAST}"),
        (BF16, UP, ((128, 256), "F16"), f"[128, 256] F16 was read; wanted [128, 256] BF16; {CAST}"),
        (
            FP8,
            UP,
            ((128, 256), "F16"),
            f"[128, 256] F16 was read; wanted [128, 256] F8_E4M3 or BF16; {CAST}",
        ),
        (
            BF16,
            SHARED_DOWN,
            ((256, 384), "BF16"),
            "[256, 384] BF16 was read; wanted [256, 128] BF16",
        ),
        (FP8, "gate.weight", ((3, 256), "BF16"), "[3, 256] BF16 was read; wanted [2, 256] BF16"),
        (FP8, BIAS, ((3,), "F32"), "[3] F32 was read; wanted [2] F32 or BF16"),
        (
            FP8,
            f"{UP}_scale_inv",
            ((2, 1), "F32"),
            "[2, 1] F32 was read; wanted [1, 2] F32 or BF16 or F8_E8M0",
        ),
    ],
    ids=[
        "shape",
        "fp32",
        "fp16",
        "fp16-under-fp8",
        "shared-width",
        "gate-experts",
        "bias-experts",
        "scale-shape",
    ],
)
def test_a_tensor_that_does_not_fit_is_read_against_wanted(recipe, name, header, message):
    assert problems(recipe, more=[(name, header)]) == [(f"p.{name}", message)]


def test_fp8_weights_under_a_bf16_recipe_name_the_recipe_that_reads_them():
    more = [(UP, ((128, 256), "F8_E4M3")), (f"{UP}_scale_inv", ((1, 2), "F32"))]
    assert problems(BF16, more=more) == [
        (
            f"p.{UP}",
            "[128, 256] F8_E4M3 was read; wanted [128, 256] BF16; "
            "experts in F8_E4M3 are for moe.recipe fp8_block128 or fp8_per_tensor or mxfp8",
        )
    ]


@pytest.mark.parametrize(
    ("name", "spelled", "wanted"),
    [
        (UP, "experts.1.(up_proj|w3).weight", "[128, 256] BF16"),
        ("gate.weight", "gate.weight", "[2, 256] BF16"),
        (BIAS, BIAS, "[2] F32 or BF16"),
        (SHARED_DOWN, "(shared_experts|shared_expert).(down_proj|w2).weight", "[256, 128] BF16"),
    ],
    ids=["expert", "gate", "bias", "shared"],
)
def test_a_missing_tensor_is_named_with_what_is_wanted(name, spelled, wanted):
    assert problems(BF16, without=[name]) == [(f"p.{spelled}", f"missing; wanted {wanted}")]


def test_fp8_weights_without_scale_are_refused():
    name = f"{UP}_scale_inv"
    assert problems(FP8, without=[name]) == [
        (
            "p.experts.1.(up_proj|w3).(weight_scale_inv|weight_scale|scale)",
            "missing; wanted [1, 2] F32 or BF16 or F8_E8M0",
        )
    ]


def test_a_scale_beside_bf16_weights_is_refused():
    assert problems(FP8, more=[(UP, ((128, 256), "BF16"))]) == [
        (f"p.{UP}_scale_inv", "a scale, but its weight is BF16; wanted one or the other")
    ]


def test_a_bias_that_the_model_does_not_declare_names_the_config_key():
    assert problems(BF16, correction_bias=False) == [
        (
            f"p.{BIAS}",
            "deepseek_v3 declares no correction bias; its config.json key is one of "
            "correction_bias, use_routing_bias, topk_method",
        )
    ]


def test_a_shared_expert_that_the_model_does_not_declare_names_the_config_key():
    found = problems(BF16, n_shared_experts=0)
    assert {name for name, _ in found} == {
        f"p.shared_experts.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")
    }
    assert {message for _, message in found} == {
        "deepseek_v3 declares no shared expert; its config.json key is one of "
        "n_shared_experts, num_shared_experts, moe_num_shared_experts"
    }


BIASES = "expert biases are no part of this layer's formula"
STATIC = "static activation scales are not modelled; activations are quantised as they come"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("experts.2.up_proj.weight", "deepseek_v3 has 2 experts"),
        (
            "gate.tid2eid",
            "routes by token id; model.layer 'moe' wants a layer with a router "
            "(deepseek_v3 has num_hash_layers 0)",
        ),
        ("experts.1.up_proj.bias", BIASES),
        ("experts.gate_up_proj_bias", BIASES),
        ("experts.1.up_proj.input_scale", STATIC),
        ("experts.gate_up_proj_input_scale", STATIC),
        ("shared_experts.down_proj.activation_scale", STATIC),
        ("router.bias", "no part of this layer's formula reads it"),
        ("shared_expert_gate.weight", "no part of this layer's formula reads it"),
    ],
)
def test_a_tensor_that_nothing_reads_is_refused(name, message):
    assert problems(BF16, more=[(name, ((128, 256), "BF16"))]) == [(f"p.{name}", message)]


def test_fused_experts_of_another_number_are_refused():
    fused = [
        ("experts.gate_up_proj", ((3, 256, 256), "BF16")),
        ("experts.down_proj", ((2, 256, 128), "BF16")),
    ]
    single = [name for name in headers(BF16) if name.startswith("experts.")]
    assert problems(BF16, without=single, more=fused) == [
        (
            "p.experts.gate_up_proj",
            "[3, 256, 256] BF16 was read; wanted [2, 256, 256] BF16",
        )
    ]


def test_all_problems_of_quantised_experts_are_found_at_once():
    gate, down = "experts.0.gate_proj.weight", "experts.1.down_proj.weight"
    wrong = [(gate, ((128, 64), "U8")), (f"{down}_scale_inv", ((256, 8), "F32"))]
    assert problems(W4A8, without=[f"{UP}_scale_inv"], more=wrong) == [
        (f"p.{gate}", "[128, 64] U8 was read; wanted [128, 128] I8 or U8"),
        (
            "p.experts.1.(up_proj|w3).(weight_scale_inv|weight_scale|scale)",
            "missing; wanted [128, 8] U8 or F8_E8M0",
        ),
        (f"p.{down}_scale_inv", "[256, 8] F32 was read; wanted [256, 4] U8 or F8_E8M0; " + CAST),
    ]


def test_all_problems_are_found_at_once():
    found = problems(BF16, without=[UP, "gate.weight"], more=[(BIAS, ((2,), "I32"))])
    assert [name for name, _ in found] == [
        "p.experts.1.(up_proj|w3).weight",
        "p.gate.weight",
        f"p.{BIAS}",
    ]


TABLE = ("gate.tid2eid", ((1000, 1), "I32"))


def test_a_hash_layer_reads_its_table_and_no_correction_bias():
    assert problems(BF16, without=[BIAS], more=[TABLE], hashed=True) == []


def test_a_hash_layer_without_a_table_is_refused():
    found = problems(BF16, without=[BIAS], hashed=True)
    assert found == [("p.gate.tid2eid", "missing; wanted [1000, 1] I32 or I64")]

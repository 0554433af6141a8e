"""Whole layers as releases publish them: names, dtypes and shapes, opened and read."""

import pytest
import torch
from safetensors.torch import save_file

from moe.formats import QuantRecipe
from moe.quant.mxfp import dequantize_mx
from scenarios.checkpoints import CheckpointError, open_checkpoint
from scenarios.models import model_from_config
from scenarios.sections import WeightsSpec

H, I, E = 64, 32, 2  # noqa: E741
CONFIG = {
    "model_type": "deepseek_v3",
    "hidden_size": H,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "topk_method": "greedy",
    "vocab_size": 100,
}
FP4_RECIPES = pytest.mark.parametrize(
    "recipe", [QuantRecipe.MXFP4_W4A8, QuantRecipe.MXFP4_AS_FP8], ids=str
)


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def any_bytes(seed, *shape, low=0, high=256):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def exponents(seed, *shape):
    return any_bytes(seed, *shape, low=100, high=140)


PROJECTIONS = (("w1", I, H), ("w3", I, H), ("w2", H, I))


def deepseek_v4():
    """fp4 experts and an fp8 shared one with scales that are powers of two."""
    layer = {"layers.3.ffn.gate.weight": drawn(1, E, H)}
    for expert in range(E):
        for number, (part, n, k) in enumerate(PROJECTIONS):
            name = f"layers.3.ffn.experts.{expert}.{part}"
            seed = 10 * expert + number
            layer[f"{name}.weight"] = any_bytes(seed, n, k // 2).view(torch.int8)
            layer[f"{name}.scale"] = exponents(seed, n, k // 32).view(torch.float8_e8m0fnu)
    for number, (part, n, k) in enumerate(PROJECTIONS):
        name = f"layers.3.ffn.shared_experts.{part}"
        layer[f"{name}.weight"] = drawn(90 + number, n, k).to(torch.float8_e4m3fn)
        layer[f"{name}.scale"] = exponents(90 + number, 1, 1).view(torch.float8_e8m0fnu)
    return layer


def kimi_k3():
    """The same experts as bytes by other names, and a shared expert in bf16."""
    prefix = "language_model.model.layers.3.block_sparse_moe"
    layer = {f"{prefix}.gate.weight": drawn(1, E, H)}
    for name, tensor in deepseek_v4().items():
        path = name.removeprefix("layers.3.ffn.").split(".")
        if path[0] == "experts":
            last = "weight_packed" if path[-1] == "weight" else "weight_scale"
            layer[".".join([prefix, *path[:-1], last])] = tensor.view(torch.uint8)
    for number, (part, n, k) in enumerate(PROJECTIONS):
        layer[f"{prefix}.shared_experts.{part}.weight"] = drawn(90 + number, n, k)
    return layer


def gpt_oss():
    """The same experts in one tensor a projection, gate and up rows in turns, no shared one."""
    v4 = deepseek_v4()

    def stacked(part, name):
        rows = [v4[f"layers.3.ffn.experts.{expert}.{part}.{name}"] for expert in range(E)]
        return torch.stack([row.view(torch.uint8) for row in rows])

    layer = {"model.layers.3.mlp.router.weight": drawn(1, E, H)}
    for old, new in (("weight", "blocks"), ("scale", "scales")):
        turns = torch.stack([stacked("w1", old), stacked("w3", old)], dim=2).flatten(1, 2)
        for name, rows in (("gate_up_proj", turns), ("down_proj", stacked("w2", old))):
            stored = rows.unflatten(-1, (-1, 16)) if new == "blocks" else rows
            layer[f"model.layers.3.mlp.experts.{name}_{new}"] = stored.contiguous()
    return layer


def minimax_m3():
    """mxfp8 experts, the shared one too."""
    prefix = "model.layers.3.block_sparse_moe"
    layer = {f"{prefix}.gate.weight": drawn(1, E, H)}
    for number, owner in enumerate(("experts.0", "experts.1", "shared_experts")):
        for place, (part, n, k) in enumerate(PROJECTIONS):
            seed = 10 * number + place
            name = f"{prefix}.{owner}.{part}.weight"
            layer[name] = drawn(seed, n, k).to(torch.float8_e4m3fn)
            layer[f"{name}_scale_inv"] = exponents(seed, n, k // 32)
    return layer


def fused(layer, prefix="model.layers.3.block_sparse_moe.experts"):
    """The routed experts of ``layer`` in one tensor a projection, gate rows first."""
    rest = {name: values for name, values in layer.items() if ".experts." not in name}
    for suffix in ("", "_scale_inv"):
        gate, up, down = (
            torch.stack([layer[f"{prefix}.{e}.{part}.weight{suffix}"] for e in range(E)])
            for part in ("w1", "w3", "w2")
        )
        rest[f"{prefix}.gate_up_proj{suffix}"] = torch.cat([gate, up], 1)
        rest[f"{prefix}.down_proj{suffix}"] = down
    return rest


def one_scale_a_matrix():
    """fp8 experts with scalars for scales."""
    layer = minimax_m3()
    scales = [name for name in layer if name.endswith("_scale_inv")]
    for number, name in enumerate(scales):
        del layer[name]
        layer[name.removesuffix("_inv")] = torch.tensor(0.25 + number)
    return layer


@pytest.fixture
def opened(tmp_path):
    """Save a layer as one file and open it."""

    def save_and_open(layer, recipe, *, power_of_two_scales=False, **config):
        path = tmp_path / "model.safetensors"
        save_file(layer, path)
        spec = WeightsSpec(kind="safetensors", path=str(path), layer=3)
        model = model_from_config(CONFIG | config)
        return open_checkpoint(spec, model, recipe, power_of_two_scales=power_of_two_scales)

    return save_and_open


def assert_same(one, two):
    for a, b in ((one.w13, two.w13), (one.w2, two.w2)):
        assert torch.equal(a.values.view(torch.uint8), b.values.view(torch.uint8))
        assert torch.equal(a.scale, b.scale)
        assert a.group_size == b.group_size


@FP4_RECIPES
def test_deepseek_v4_is_read_as_its_bytes(opened, recipe):
    layer = deepseek_v4()
    w13 = opened(layer, recipe).experts([1]).w13
    parts = [f"layers.3.ffn.experts.1.{part}" for part in ("w1", "w3")]
    values = torch.cat([layer[f"{part}.weight"] for part in parts]).view(torch.uint8)
    scale = torch.cat([layer[f"{part}.scale"].view(torch.uint8) for part in parts])
    assert torch.equal(w13.values[0], values)
    assert torch.equal(w13.scale[0], scale)


@FP4_RECIPES
def test_the_shared_expert_of_deepseek_v4_is_fp8_blocks(opened, recipe):
    layer = deepseek_v4()
    shared = opened(layer, recipe).common().shared
    byte = int(layer["layers.3.ffn.shared_experts.w2.scale"].view(torch.uint8))
    assert shared.w2.values.dtype == torch.float8_e4m3fn
    assert shared.w2.scale.tolist() == [[[2.0 ** (byte - 127)]]]


@FP4_RECIPES
def test_a_bf16_shared_expert_beside_fp4_is_quantised_in_blocks(opened, recipe):
    shared = opened(kimi_k3(), recipe).common().shared
    assert shared.w2.values.dtype == torch.float8_e4m3fn
    assert shared.w2.scale.item() == (drawn(92, H, I).float().abs().max() / 448).item()


@FP4_RECIPES
def test_kimi_k3_reads_like_deepseek_v4(opened, recipe):
    both = range(E)
    kimi = opened(kimi_k3(), recipe).experts(both)
    assert_same(kimi, opened(deepseek_v4(), recipe).experts(both))


@FP4_RECIPES
def test_gpt_oss_reads_like_deepseek_v4(opened, recipe):
    both = range(E)
    oss = opened(gpt_oss(), recipe, n_shared_experts=0).experts(both)
    assert_same(oss, opened(deepseek_v4(), recipe).experts(both))


def test_the_ideal_experts_of_gpt_oss_are_those_of_deepseek_v4(opened):
    recipe = QuantRecipe.MXFP4_W4A8
    oss = opened(gpt_oss(), recipe, n_shared_experts=0).ideal_expert(1)
    v4 = opened(deepseek_v4(), recipe).ideal_expert(1)
    assert all(torch.equal(a, b) for a, b in zip(oss, v4, strict=True))


def test_the_biases_of_gpt_oss_are_refused_one_by_one(opened):
    layer = gpt_oss()
    for name, width in (("gate_up_proj", 2 * I), ("down_proj", H)):
        layer[f"model.layers.3.mlp.experts.{name}_bias"] = drawn(5, E, width)
    with pytest.raises(CheckpointError) as caught:
        opened(layer, QuantRecipe.MXFP4_W4A8, n_shared_experts=0)
    assert {
        problem.tensor.split(".")[-1]: problem.message for problem in caught.value.problems
    } == {
        "gate_up_proj_bias": "expert biases are no part of this layer's formula",
        "down_proj_bias": "expert biases are no part of this layer's formula",
    }


def test_fused_mxfp8_experts_equal_single_ones(opened):
    single = opened(minimax_m3(), QuantRecipe.MXFP8).experts(range(E))
    assert_same(single, opened(fused(minimax_m3()), QuantRecipe.MXFP8).experts(range(E)))


@pytest.mark.parametrize(
    ("layer", "recipe"),
    [(deepseek_v4, QuantRecipe.MXFP4_W4A8), (minimax_m3, QuantRecipe.MXFP8)],
    ids=["mxfp4", "mxfp8"],
)
def test_ideal_experts_are_what_the_pipeline_decodes(opened, layer, recipe):
    weights = opened(layer(), recipe)
    read, ideal = weights.experts([1]), weights.ideal_expert(1)
    for matrix, exact in zip((read.w13, read.w2), ideal, strict=True):
        assert torch.equal(dequantize_mx(matrix.values, matrix.scale)[0].double(), exact)


def test_gate_and_up_keep_a_scale_each(opened):
    weights = opened(one_scale_a_matrix(), QuantRecipe.FP8_PER_TENSOR)
    experts = weights.experts([1, 0])
    assert experts.w13.scale.tolist() == [[3.25, 4.25], [0.25, 1.25]]
    assert experts.w2.scale.tolist() == [[5.25], [2.25]]
    assert weights.common().shared.w13.scale.tolist() == [[6.25, 7.25]]


def test_the_ideal_rows_of_gate_and_up_have_their_own_scale(opened):
    layer = one_scale_a_matrix()
    w13, _ = opened(layer, QuantRecipe.FP8_PER_TENSOR).ideal_expert(1)
    name = "model.layers.3.block_sparse_moe.experts.1.{}.weight"
    assert torch.equal(w13[:I], layer[name.format("w1")].double() * 3.25)
    assert torch.equal(w13[I:], layer[name.format("w3")].double() * 4.25)


def test_static_activation_scales_are_refused(opened):
    layer = one_scale_a_matrix()
    layer["model.layers.3.block_sparse_moe.experts.0.w1.input_scale"] = torch.tensor(1.0)
    with pytest.raises(CheckpointError, match="static activation scales are not modelled"):
        opened(layer, QuantRecipe.FP8_PER_TENSOR)


def bf16_layer():
    layer = {name: v for name, v in minimax_m3().items() if not name.endswith("_scale_inv")}
    return {name: values.to(torch.bfloat16) for name, values in layer.items()}


@pytest.mark.parametrize("wanted", [True, False], ids=["powers-of-two", "as-they-come"])
def test_bf16_experts_get_one_scale_a_matrix_of_the_kind_that_is_wanted(opened, wanted):
    weights = opened(bf16_layer(), QuantRecipe.FP8_PER_TENSOR, power_of_two_scales=wanted)
    for mlp in (weights.experts([0, 1]), weights.common().shared):
        for matrix in (mlp.w13, mlp.w2):
            mantissa, _ = torch.frexp(matrix.scale)
            assert bool((mantissa == 0.5).all()) is wanted


@pytest.mark.parametrize("name", ["gate.weight", "gate.e_score_correction_bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_router_without_a_number_is_an_error(opened, name, value):
    layer = bf16_layer()
    prefix = "model.layers.3.block_sparse_moe"
    layer[f"{prefix}.gate.e_score_correction_bias"] = torch.zeros(E)
    layer[f"{prefix}.{name}"].view(-1)[1] = value
    weights = opened(layer, QuantRecipe.BF16, topk_method="noaux_tc")
    with pytest.raises(CheckpointError, match=rf"{name}: the value at \[(0, )?1\] is "):
        weights.common()


def test_bf16_experts_with_one_scale_a_matrix_read_the_same_fused(opened):
    layer = bf16_layer()
    prefix = "model.layers.3.block_sparse_moe.experts"
    joined = {name: values for name, values in layer.items() if ".experts." not in name}
    gate, up, down = (
        torch.stack([layer[f"{prefix}.{e}.{part}.weight"] for e in range(E)])
        for part in ("w1", "w3", "w2")
    )
    joined |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    single = opened(layer, QuantRecipe.FP8_PER_TENSOR).experts(range(E))
    assert single.w13.scale.shape == (E, 2)
    assert_same(single, opened(joined, QuantRecipe.FP8_PER_TENSOR).experts(range(E)))

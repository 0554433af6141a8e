import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from moe.formats import QuantRecipe
from moe.weights import checkpoint_weights
from scenarios.checkpoints import CheckpointError, open_checkpoint
from scenarios.models import model_from_config
from scenarios.sections import WeightsSpec

H, I, E = 256, 128, 4  # noqa: E741
MODEL = model_from_config(
    {
        "model_type": "deepseek_v3",
        "hidden_size": H,
        "moe_intermediate_size": I,
        "n_routed_experts": E,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "vocab_size": 1000,
    }
)
DEEPSEEK = ("model.layers.3.mlp", "gate_proj", "up_proj", "down_proj", "shared_experts")
MIXTRAL = ("model.layers.3.block_sparse_moe", "w1", "w3", "w2", "shared_expert")
DEEPSEEK_V4 = ("layers.3.ffn", "w1", "w3", "w2", "shared_experts")
FAMILIES = pytest.mark.parametrize("family", [DEEPSEEK, MIXTRAL, DEEPSEEK_V4], ids=lambda f: f[0])


def drawn(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def bf16_layer(family=DEEPSEEK):
    """One layer, every tensor with values of its own."""
    prefix, gate, up, down, shared = family
    layer = {
        f"{prefix}.gate.weight": drawn(1, E, H),
        f"{prefix}.gate.e_score_correction_bias": torch.tensor([0.1, -0.2, 0.3, 0.0]),
    }
    owners = [f"{prefix}.experts.{expert}" for expert in range(E)] + [f"{prefix}.{shared}"]
    for number, owner in enumerate(owners):
        layer[f"{owner}.{gate}.weight"] = drawn(10 + number, I, H)
        layer[f"{owner}.{up}.weight"] = drawn(20 + number, I, H)
        layer[f"{owner}.{down}.weight"] = drawn(30 + number, H, I)
    return layer


def fp8_layer():
    """The same names with e4m3 codes and fp32 scales that are no powers of two."""
    layer = {}
    for number, (name, values) in enumerate(bf16_layer().items()):
        if values.ndim == 1 or name.endswith(".gate.weight"):
            layer[name] = values
            continue
        rows, columns = values.shape
        layer[name] = values.to(torch.float8_e4m3fn)
        scale = torch.arange(1, rows // 128 * (columns // 128) + 1) * 0.3 + number
        layer[f"{name}_scale_inv"] = scale.view(rows // 128, columns // 128)
    return layer


def fused_layer(layer, expert_prefix="model.layers.3.mlp.experts"):
    """The experts of ``layer`` in one tensor a projection, gate rows first."""
    rest = {name: values for name, values in layer.items() if ".experts." not in name}
    for suffix in ("", "_scale_inv"):
        if f"{expert_prefix}.0.gate_proj.weight{suffix}" not in layer:
            continue
        gate, up, down = (
            torch.stack([layer[f"{expert_prefix}.{e}.{part}.weight{suffix}"] for e in range(E)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        rest[f"{expert_prefix}.gate_up_proj{suffix}"] = torch.cat([gate, up], 1)
        rest[f"{expert_prefix}.down_proj{suffix}"] = down
    return rest


@pytest.fixture
def opened(tmp_path):
    """Save a layer as one file and open it."""

    def save_and_open(layer, recipe=QuantRecipe.BF16, model=MODEL):
        path = tmp_path / "model.safetensors"
        save_file(layer, path)
        return open_checkpoint(spec(path), model, recipe)

    return save_and_open


def spec(path, layer=3):
    return WeightsSpec(kind="safetensors", path=str(path), layer=layer)


def shard(layer, folder):
    """Experts 0 and 1 in one file, the rest in another, and an index."""
    first = {n: v for n, v in layer.items() if ".experts.0." in n or ".experts.1." in n}
    second = {n: v for n, v in layer.items() if n not in first}
    files = {"one.safetensors": first, "two.safetensors": second}
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return index


def bits(tensor):
    return tensor.view(torch.uint8)


@FAMILIES
def test_w13_of_an_expert_is_its_gate_rows_then_its_up_rows(opened, family):
    layer = bf16_layer(family)
    prefix, gate, up, *_ = family
    w13 = opened(layer).experts([2]).w13.values
    assert torch.equal(w13[0, :I], layer[f"{prefix}.experts.2.{gate}.weight"])
    assert torch.equal(w13[0, I:], layer[f"{prefix}.experts.2.{up}.weight"])


@FAMILIES
def test_w2_stands_in_the_order_that_was_asked_for(opened, family):
    layer = bf16_layer(family)
    w2 = opened(layer).experts([3, 1]).w2.values
    down = f"{family[0]}.experts.{{}}.{family[3]}.weight"
    assert torch.equal(w2, torch.stack([layer[down.format(3)], layer[down.format(1)]]))


@FAMILIES
def test_the_shared_expert_is_one_expert(opened, family):
    layer = bf16_layer(family)
    prefix, gate, up, down, shared = family
    read = opened(layer).common().shared
    rows = [layer[f"{prefix}.{shared}.{part}.weight"] for part in (gate, up)]
    assert torch.equal(read.w13.values, torch.cat(rows)[None])
    assert torch.equal(read.w2.values, layer[f"{prefix}.{shared}.{down}.weight"][None])


def test_the_router_is_the_stored_one(opened):
    common = opened(bf16_layer()).common()
    assert torch.equal(common.gate_weight, drawn(1, E, H))
    assert torch.equal(common.correction_bias, torch.tensor([0.1, -0.2, 0.3, 0.0]))


@pytest.mark.parametrize("name", ["e_score_correction_bias", "gate.bias"])
def test_a_bias_by_another_name_in_bf16_is_widened_to_fp32(opened, name):
    layer = bf16_layer()
    del layer["model.layers.3.mlp.gate.e_score_correction_bias"]
    layer[f"model.layers.3.mlp.{name}"] = torch.tensor([0.5, 1.5, -2.0, 3.0], dtype=torch.bfloat16)
    bias = opened(layer).common().correction_bias
    assert bias.dtype == torch.float32
    assert bias.tolist() == [0.5, 1.5, -2.0, 3.0]


@pytest.mark.parametrize("form", [bf16_layer, fp8_layer], ids=["bf16", "fp8"])
def test_fused_experts_equal_single_ones(opened, form):
    recipe = QuantRecipe.BF16 if form is bf16_layer else QuantRecipe.FP8_BLOCK128
    single = opened(form(), recipe).experts(range(E))
    fused = opened(fused_layer(form()), recipe).experts(range(E))
    for a, b in ((single.w13, fused.w13), (single.w2, fused.w2)):
        assert torch.equal(bits(a.values), bits(b.values))
        assert (a.scale is None and b.scale is None) or torch.equal(a.scale, b.scale)


def test_fp8_codes_and_scales_are_the_stored_ones(opened):
    layer = fp8_layer()
    w13 = opened(layer, QuantRecipe.FP8_BLOCK128).experts([1]).w13
    parts = [f"model.layers.3.mlp.experts.1.{part}.weight" for part in ("gate_proj", "up_proj")]
    assert torch.equal(bits(w13.values[0]), torch.cat([bits(layer[part]) for part in parts]))
    assert torch.equal(w13.scale[0], torch.cat([layer[f"{part}_scale_inv"] for part in parts]))


def test_scales_in_bf16_are_widened_to_fp32(opened):
    layer = fp8_layer()
    name = "model.layers.3.mlp.experts.0.down_proj.weight_scale_inv"
    layer[name] = torch.tensor([[0.5], [0.75]], dtype=torch.bfloat16)
    scale = opened(layer, QuantRecipe.FP8_BLOCK128).experts([0]).w2.scale
    assert scale.dtype == torch.float32
    assert scale.tolist() == [[[0.5], [0.75]]]


def test_bf16_weights_under_an_fp8_recipe_get_the_largest_code_in_each_block(opened):
    w2 = opened(bf16_layer(), QuantRecipe.FP8_BLOCK128).experts([0]).w2
    top, bottom = drawn(30, H, I).float().split(128)
    assert w2.values.float()[0].split(128)[0].abs().max() == 448.0
    assert w2.scale[0].flatten().tolist() == [
        (block.abs().max() / 448).item() for block in (top, bottom)
    ]


def test_the_ideal_expert_of_bf16_weights_is_the_stored_values(opened):
    layer = bf16_layer()
    w13, w2 = opened(layer, QuantRecipe.FP8_BLOCK128).ideal_expert(1)
    assert w13.dtype == torch.float64
    assert torch.equal(w13, torch.cat([drawn(11, I, H), drawn(21, I, H)]).double())
    assert torch.equal(w2, drawn(31, H, I).double())


def test_the_ideal_expert_of_fp8_weights_is_code_times_scale_in_float64(opened):
    layer = fp8_layer()
    _, w2 = opened(layer, QuantRecipe.FP8_BLOCK128).ideal_expert(2)
    codes = layer["model.layers.3.mlp.experts.2.down_proj.weight"].double()
    scale = layer["model.layers.3.mlp.experts.2.down_proj.weight_scale_inv"].double()
    assert torch.equal(w2[:128], codes[:128] * scale[0, 0])
    assert torch.equal(w2[128:], codes[128:] * scale[1, 0])


def test_the_ideal_shared_expert_of_fp8_weights_is_code_times_scale_in_float64(opened):
    layer = fp8_layer()
    w13, _ = opened(layer, QuantRecipe.FP8_BLOCK128).ideal_shared()
    up = layer["model.layers.3.mlp.shared_experts.up_proj.weight"].double()
    scale = layer["model.layers.3.mlp.shared_experts.up_proj.weight_scale_inv"].double()
    assert torch.equal(w13[I:, :128], up[:, :128] * scale[0, 0])
    assert torch.equal(w13[I:, 128:], up[:, 128:] * scale[0, 1])


def test_a_model_without_shared_expert_and_bias_reads_none(opened):
    layer = {
        name: values
        for name, values in bf16_layer().items()
        if "shared" not in name and "bias" not in name
    }
    plain = model_from_config(
        {
            "model_type": "qwen3_moe",
            "hidden_size": H,
            "moe_intermediate_size": I,
            "num_experts": E,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "vocab_size": 1000,
        }
    )
    weights = opened(layer, model=plain)
    assert (weights.common().shared, weights.common().correction_bias) == (None, None)
    assert weights.ideal_shared() is None


@pytest.mark.parametrize("named", ["index", "directory"])
def test_a_sharded_checkpoint_reads_like_a_single_file(opened, tmp_path, named):
    folder = tmp_path / "sharded"
    folder.mkdir()
    index = shard(bf16_layer(), folder)
    path = index if named == "index" else folder
    sharded = open_checkpoint(spec(path), MODEL, QuantRecipe.BF16).experts(range(E))
    assert torch.equal(sharded.w13.values, opened(bf16_layer()).experts(range(E)).w13.values)


def test_experts_of_one_shard_load_when_the_other_has_gone(tmp_path):
    weights = open_checkpoint(spec(shard(bf16_layer(), tmp_path)), MODEL, QuantRecipe.BF16)
    (tmp_path / "two.safetensors").unlink()
    assert torch.equal(weights.experts([1]).w2.values[0], drawn(31, H, I))


def test_experts_whose_shard_has_gone_are_an_error_that_names_it(tmp_path):
    weights = open_checkpoint(spec(shard(bf16_layer(), tmp_path)), MODEL, QuantRecipe.BF16)
    (tmp_path / "one.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"one\.safetensors: cannot be read"):
        weights.experts([1])


def test_a_shard_that_is_not_there_is_the_one_problem(tmp_path):
    index = shard(bf16_layer(), tmp_path)
    (tmp_path / "one.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(spec(index), MODEL, QuantRecipe.BF16)
    assert [problem.file for problem in caught.value.problems] == [
        str(tmp_path / "one.safetensors")
    ]


def test_weights_travel_as_a_plain_value(opened):
    weights = opened(bf16_layer())
    arrived = pickle.loads(pickle.dumps(weights))
    assert arrived == weights
    assert torch.equal(arrived.experts([0]).w2.values[0], drawn(30, H, I))


def test_a_rank_gets_the_experts_it_holds(opened):
    rank = checkpoint_weights(opened(bf16_layer()), [2, 3])
    assert rank.expert_ids.tolist() == [2, 3]
    assert torch.equal(rank.experts.w2.values, torch.stack([drawn(32, H, I), drawn(33, H, I)]))


def test_every_problem_of_a_checkpoint_is_reported_with_its_file(opened, tmp_path):
    layer = bf16_layer()
    layer["model.layers.3.mlp.gate.weight"] = drawn(1, E, H // 2)
    layer["model.layers.3.mlp.experts.2.up_proj.weight"] = drawn(22, I, H).float()
    with pytest.raises(CheckpointError) as caught:
        opened(layer)
    path = tmp_path / "model.safetensors"
    assert str(caught.value) == (
        f"{path}: 2 problem(s)\n"
        f"  {path}: model.layers.3.mlp.experts.2.up_proj.weight: [128, 256] F32 was read; wanted "
        "[128, 256] BF16; nothing is cast at load, convert the checkpoint first\n"
        f"  {path}: model.layers.3.mlp.gate.weight: [4, 128] BF16 was read; wanted [4, 256] BF16"
    )

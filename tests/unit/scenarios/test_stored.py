"""Tokens and weights come back from files with every bit they had."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from moe.batch import Batch
from moe.formats import QuantRecipe
from scenarios.errors import InputError
from scenarios.presets import PRESETS, Preset
from scenarios.stored import (
    store_batch,
    store_weights,
    stored_batch,
    stored_weights,
    weights_file,
)
from scenarios.synthetic_weights import SyntheticWeights

MODEL = replace(
    PRESETS[Preset.DEEPSEEK_V4], hidden_size=128, moe_intermediate_size=128, n_routed_experts=3
)


def drawn(recipe: QuantRecipe, **more) -> SyntheticWeights:
    return SyntheticWeights(
        seed=1,
        hidden_size=128,
        intermediate_size=128,
        num_experts=3,
        recipe=recipe,
        **{"shared_intermediate_size": 128, "correction_bias": True, **more},
    )


def same(one, other) -> bool:
    """Two matrices, bit by bit."""
    scales = one.scale is None if other.scale is None else torch.equal(one.scale, other.scale)
    values = torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
    return values and scales and one.group_size == other.group_size


def stored(source, folder: Path, mode="random"):
    store_weights(source, 3, folder, mode)
    return stored_weights(folder, mode, MODEL)


@pytest.mark.parametrize("recipe", QuantRecipe)
def test_experts_of_every_recipe_come_back_in_any_order(recipe, tmp_path):
    source = drawn(recipe)
    found, due = stored(source, tmp_path).experts([2, 0]), source.experts([2, 0])
    assert same(found.w13, due.w13)
    assert same(found.w2, due.w2)


def test_what_every_rank_holds_comes_back(tmp_path):
    source = drawn(QuantRecipe.FP8_BLOCK128, vocab_size=16, hash_slots=2)
    found, due = stored(source, tmp_path).common(), source.common()
    assert same(found.shared.w13, due.shared.w13)
    for name in ("gate_weight", "correction_bias", "tid2eid"):
        assert torch.equal(getattr(found, name), getattr(due, name))


def test_what_a_layer_lacks_stays_absent(tmp_path):
    source = drawn(QuantRecipe.BF16, shared_intermediate_size=0, correction_bias=False)
    weights = stored(source, tmp_path)
    common = weights.common()
    assert (common.shared, common.correction_bias, common.tid2eid) == (None, None, None)
    assert weights.ideal_shared() is None


def test_what_weights_were_before_rounding_comes_back(tmp_path):
    source = drawn(QuantRecipe.MXFP4_W4A8)
    weights = stored(source, tmp_path)
    for found, due in zip(weights.ideal_expert(1), source.ideal_expert(1), strict=True):
        assert found.dtype == torch.float64
        assert torch.equal(found, due)


def test_numbers_that_bf16_lacks_keep_their_bits(tmp_path):
    third = torch.full((128, 128), 1 / 3, dtype=torch.float64)

    class Thirds(SyntheticWeights):
        def ideal_expert(self, expert_id):
            return third.repeat(2, 1), third

    source = Thirds(
        **{one.name: getattr(drawn(QuantRecipe.BF16), one.name) for one in fields(SyntheticWeights)}
    )
    assert torch.equal(stored(source, tmp_path).ideal_expert(0)[1], third)


@pytest.mark.parametrize(("mode", "is_exact"), [("exact", True), ("random", False)])
def test_weights_of_exact_mode_say_so(mode, is_exact, tmp_path):
    assert stored(drawn(QuantRecipe.BF16), tmp_path, mode).is_exact is is_exact


def test_a_batch_comes_back_with_what_it_pins_and_nothing_else(tmp_path):
    batch = Batch(
        hidden_states=torch.randn(2, 4).to(torch.bfloat16),
        topk_weights=torch.tensor([[0.5], [0.25]]),
    )
    store_batch(batch, tmp_path, "exact")
    found = stored_batch(tmp_path, "exact", 2, 4)
    assert torch.equal(found.hidden_states, batch.hidden_states)
    assert torch.equal(found.topk_weights, batch.topk_weights)
    assert (found.topk_ids, found.input_ids) == (None, None)


def test_tokens_of_another_shape_are_refused(tmp_path):
    store_batch(Batch(hidden_states=torch.zeros(2, 4)), tmp_path, "random")
    with pytest.raises(InputError, match=r"hidden_states is \[2, 4\]; the scenario wants \[3, 4\]"):
        stored_batch(tmp_path, "random", 3, 4)


@pytest.mark.parametrize(
    ("size", "name"), [("n_routed_experts", "gate_weight"), ("moe_intermediate_size", "ideal_w2")]
)
def test_a_layer_of_other_sizes_is_refused(size, name, tmp_path):
    stored(drawn(QuantRecipe.BF16), tmp_path)
    with pytest.raises(InputError, match=rf"{name} is \[.*\]; the scenario wants \["):
        stored_weights(tmp_path, "random", replace(MODEL, **{size: 64}))


def test_a_file_that_has_gone_is_named(tmp_path):
    with pytest.raises(InputError, match=str(weights_file(tmp_path, "random"))):
        stored_weights(tmp_path, "random", MODEL)

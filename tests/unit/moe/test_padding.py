"""Padded experts: the same products, zeros for the columns that were not there."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe.activation import gated_product
from moe.formats import ActivationKind, GatedActivation, QuantRecipe, ScaleFormat
from moe.grouped_gemm import TorchGemm
from moe.padding import PaddedWeights, pad_columns
from moe.quant.e2m1 import pack_e2m1
from moe.quant.fp8 import quantize_groups
from moe.weight_preparation import prepare_weights
from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights, LayerWeights
from reports.verdict.golden_matrix import stored_matrix

EXPERTS, HIDDEN, INTERMEDIATE, WIDE = 2, 32, 64, 128
"""Sizes of the experts as they are, and of either side once it is padded."""
FORMS = pytest.mark.parametrize("form", ["bf16", "mxfp4"])


def drawn(seed: int, *shape: int, limit: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, limit, shape, generator=generator)


def matrix(form: str, seed: int, rows: int, columns: int) -> ExpertMatrix:
    """Small integers or e2m1 values with scales of 1 to 4, so that every fp32 sum is exact."""
    if form == "bf16":
        values = drawn(seed, EXPERTS, rows, columns, limit=9) - 4
        return ExpertMatrix(values=values.to(torch.bfloat16), scale=None)
    codes = drawn(seed, EXPERTS, rows, columns, limit=16).byte()
    scale = drawn(seed + 1, EXPERTS, rows, columns // 32, limit=3) + 127
    return ExpertMatrix(values=pack_e2m1(codes), scale=scale.byte(), group_size=32)


class DrawnSource:
    """Two experts of 32 by 64."""

    def __init__(self, form: str) -> None:
        self.common_weights = CommonWeights(
            shared=None, gate_weight=torch.zeros(EXPERTS, HIDDEN), correction_bias=None
        )
        self.weights = ExpertWeights(
            w13=matrix(form, 1, 2 * INTERMEDIATE, HIDDEN), w2=matrix(form, 3, HIDDEN, INTERMEDIATE)
        )

    def experts(self, expert_ids) -> ExpertWeights:
        return self.weights

    def common(self) -> CommonWeights:
        return self.common_weights

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        return stored_matrix(self.weights.w13), stored_matrix(self.weights.w2)

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        return None


def padded(form: str) -> PaddedWeights:
    return PaddedWeights(source=DrawnSource(form), hidden_size=WIDE, intermediate_size=WIDE)


def framed(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Gate rows, zeros, up rows, zeros, with zeros on the right; w2 with zeros around it."""
    right, below = WIDE - HIDDEN, WIDE - INTERMEDIATE
    gate, up = (pad(half, (0, right, 0, below)) for half in w13.chunk(2))
    return torch.cat([gate, up]), pad(w2, (0, below, 0, right))


@FORMS
def test_gate_and_up_are_padded_each(form):
    weights, plain = padded(form).experts([0, 1]), DrawnSource(form).weights
    w13, w2 = framed(stored_matrix(plain.w13), stored_matrix(plain.w2))
    assert torch.equal(stored_matrix(weights.w13), w13)
    assert torch.equal(stored_matrix(weights.w2), w2)


def test_the_bytes_of_padding_are_zeros():
    w2 = padded("mxfp4").experts([0, 1]).w2
    assert (w2.values.shape, w2.scale.shape) == ((EXPERTS, WIDE, 64), (EXPERTS, WIDE, 4))
    assert w2.values[:, HIDDEN:].count_nonzero() == w2.values[..., 32:].count_nonzero() == 0
    assert w2.scale[:, HIDDEN:].count_nonzero() == w2.scale[..., 2:].count_nonzero() == 0


@FORMS
def test_the_unrounded_experts_are_padded_in_the_same_way(form):
    w13, w2 = framed(*DrawnSource(form).ideal_expert(0))
    got = padded(form).ideal_expert(0)
    assert torch.equal(got[0], w13)
    assert torch.equal(got[1], w2)


def test_what_every_rank_holds_is_not_padded():
    source = padded("bf16")
    assert source.common() is source.source.common()
    assert source.ideal_shared() is None


def products(form: str, weights: ExpertWeights, name: str, rows: Tensor) -> Tensor:
    """Rows times the prepared matrix of the second expert."""
    scales = ScaleFormat.NONE if form == "bf16" else ScaleFormat.UE8M0
    recipe = QuantRecipe.BF16 if form == "bf16" else QuantRecipe.MXFP4_W4A8
    layer = LayerWeights(
        expert_ids=torch.arange(EXPERTS),
        experts=weights,
        shared=None,
        gate_weight=torch.zeros(EXPERTS, 1),
        correction_bias=None,
    )
    matrix = getattr(prepare_weights(layer, recipe, scales).experts, name)
    gemm, expert, scale = TorchGemm(), torch.ones(len(rows), dtype=torch.int32), None
    if form == "mxfp4":
        quantized = quantize_groups(rows, scales, group_size=32)
        rows, scale = quantized.values, quantized.scale
    return gemm.grouped_gemm_nt_contig(rows, scale, gemm.load(matrix), expert, 32)


def integers(seed: int, columns: int) -> Tensor:
    return (drawn(seed, 5, columns, limit=9) - 4).to(torch.bfloat16)


@FORMS
def test_a_padded_w13_gives_the_same_products_and_zeros(form):
    rows = integers(7, HIDDEN)
    plain = products(form, DrawnSource(form).weights, "w13", rows)
    wide = products(form, padded(form).experts([0, 1]), "w13", pad_columns(rows, WIDE))
    gate, up = (pad_columns(half, WIDE) for half in plain.chunk(2, dim=1))
    assert torch.equal(wide, torch.cat([gate, up], dim=1))
    assert plain.count_nonzero() > 0


@FORMS
def test_a_padded_w2_gives_the_same_products_and_zeros(form):
    rows = integers(8, INTERMEDIATE)
    plain = products(form, DrawnSource(form).weights, "w2", rows)
    wide = products(form, padded(form).experts([0, 1]), "w2", pad_columns(rows, WIDE))
    assert torch.equal(wide, pad_columns(plain, WIDE))
    assert plain.count_nonzero() > 0


@pytest.mark.parametrize(
    "rule",
    [
        GatedActivation(limit=10.0),
        GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702, limit=7.0),
        GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0),
    ],
    ids=lambda rule: rule.kind,
)
def test_columns_of_padding_stay_zero_in_every_activation(rule):
    assert gated_product(torch.zeros(1, 4, dtype=torch.bfloat16), rule).tolist() == [[0.0, 0.0]]


def test_columns_of_zeros_are_put_behind_a_row():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert pad_columns(rows, 4).tolist() == [[1.0, 2.0, 0.0, 0.0], [3.0, 4.0, 0.0, 0.0]]


def test_rows_that_are_wide_enough_are_not_copied():
    rows = torch.ones(2, 4)
    assert pad_columns(rows, 4) is rows

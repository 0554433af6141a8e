"""The reference GEMM with the scale groups of every recipe, against float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import round_bf16
from moe.grouped_gemm import TorchGemm
from moe.quant.e2m1 import pack_e2m1
from moe.quant.fp8 import quantize_groups
from moe.quant.ue8m0 import mn_major, pack_ue8m0
from moe.slabs import spread_slab_scales, spread_slabs
from moe.weight_preparation import prepare_blocks, prepare_mxfp4, prepare_mxfp8
from moe.weights import ExpertMatrix
from reports.verdict.decode import decode_matrix, dequantized
from tests.unit.moe.checkpoint_matrices import checkpoint_matrix, drawn

EXPERTS, N, K = 3, 160, 384
UE8M0 = ScaleFormat.UE8M0
HEIGHT = 64
COUNTS = [20, 0, 30]
ROWS_OF = [0] * 20 + [2] * 30
PREPARE = {
    QuantRecipe.FP8_BLOCK128: prepare_blocks,
    QuantRecipe.MXFP8: prepare_mxfp8,
    QuantRecipe.MXFP4_W4A8: prepare_mxfp4,
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Product:
    """Rows [M, K] quantised in groups of ``lhs_group``, and prepared weights."""

    lhs: Tensor
    scale: Tensor
    lhs_group: int
    matrix: ExpertMatrix

    def exact(self) -> tuple[Tensor, Tensor]:
        """[M, N] float64, and the sum of the |terms|."""
        lhs = dequantized(self.lhs, self.scale, self.lhs_group)
        assert self.matrix.scale is not None
        experts = torch.stack(
            [
                decode_matrix(values, scale, self.matrix.group_size)
                for values, scale in zip(self.matrix.values, self.matrix.scale, strict=True)
            ]
        )[ROWS_OF]
        magnitude = torch.einsum("mk,mnk->mn", lhs.abs(), experts.abs())
        return torch.einsum("mk,mnk->mn", lhs, experts), magnitude

    def check(self, got: Tensor) -> None:
        """Rounding is monotone: a sum within its noise rounds to between its rounded ends."""
        exact, magnitude = self.exact()
        noise = TorchGemm().arithmetic(UE8M0).sum_error(K) * magnitude
        assert bool((got.double() >= round_bf16(exact - noise)).all())
        assert bool((got.double() <= round_bf16(exact + noise)).all())


def product(recipe: QuantRecipe, lhs_group: int) -> Product:
    rows = drawn(1, (1, len(ROWS_OF), K))[0].to(torch.bfloat16)
    quantized = quantize_groups(rows, UE8M0, group_size=lhs_group)
    stored = checkpoint_matrix(recipe, 2, (EXPERTS, N, K))
    return Product(
        lhs=quantized.values,
        scale=quantized.scale,
        lhs_group=lhs_group,
        matrix=PREPARE[recipe](stored, UE8M0),
    )


RECIPES = pytest.mark.parametrize(
    ("recipe", "lhs_group"),
    [
        (QuantRecipe.FP8_BLOCK128, 128),
        (QuantRecipe.MXFP8, 32),
        (QuantRecipe.MXFP8, 128),
        (QuantRecipe.MXFP4_W4A8, 128),
        (QuantRecipe.MXFP4_W4A8, 32),
    ],
)


@RECIPES
def test_segments_are_multiplied_within_the_declared_error(recipe, lhs_group):
    given, gemm = product(recipe, lhs_group), TorchGemm()
    experts = torch.tensor(ROWS_OF, dtype=torch.int32)
    loaded = gemm.load(given.matrix)
    given.check(gemm.grouped_gemm_nt_contig(given.lhs, given.scale, loaded, experts, lhs_group))


@RECIPES
def test_slabs_are_multiplied_within_the_declared_error(recipe, lhs_group):
    given, gemm = product(recipe, lhs_group), TorchGemm()
    places = torch.cat([HEIGHT * e + torch.arange(m) for e, m in enumerate(COUNTS)])
    slabs = spread_slabs(given.lhs, places, EXPERTS, HEIGHT)
    scale = spread_slab_scales(given.scale, places, EXPERTS, HEIGHT)
    counts, loaded = torch.tensor(COUNTS, dtype=torch.int32), gemm.load(given.matrix)
    got = gemm.grouped_gemm_nt_masked(slabs, scale, loaded, counts, lhs_group)
    given.check(got.flatten(0, 1)[places])


def test_the_dense_form_has_the_bits_of_a_segment():
    given, gemm = product(QuantRecipe.MXFP8, 32), TorchGemm()
    loaded, first = gemm.load(given.matrix), torch.zeros(len(ROWS_OF), dtype=torch.int32)
    dense = gemm.gemm_nt(given.lhs, given.scale, loaded, 32)
    segment = gemm.grouped_gemm_nt_contig(given.lhs, given.scale, loaded, first, 32)
    assert torch.equal(dense.view(torch.int16), segment.view(torch.int16))


def test_fp32_scales_may_lie_either_way():
    gemm, experts = TorchGemm(), torch.tensor(ROWS_OF, dtype=torch.int32)
    rows = drawn(1, (1, len(ROWS_OF), K))[0].to(torch.bfloat16)
    quantized = quantize_groups(rows, ScaleFormat.FP32)
    loaded = gemm.load(checkpoint_matrix(QuantRecipe.FP8_BLOCK128, 2, (EXPERTS, N, K)))
    row_major, turned = (
        gemm.grouped_gemm_nt_contig(quantized.values, scale, loaded, experts)
        for scale in (quantized.scale, mn_major(quantized.scale))
    )
    assert torch.equal(row_major.view(torch.int16), turned.view(torch.int16))


def one_value_a_group(columns: int) -> Tensor:
    """[1, columns] codes: 1 in front of every 32 columns, then zeros."""
    row = torch.zeros(1, columns)
    row[0, ::32] = 1.0
    return row


def test_each_group_of_columns_meets_the_scales_at_its_own_place():
    """Rows with scales of 1 and 2^4 for 128 columns each, weights with 1, 2, 4, 8 for 32 each."""
    lhs = one_value_a_group(256).to(torch.float8_e4m3fn)
    lhs_scale = pack_ue8m0(torch.tensor([[127, 131]]).byte())
    codes = (2 * one_value_a_group(256)).byte()  # code 2 is 1
    by_group = torch.tensor([[[127, 128, 129, 130, 127, 128, 129, 130]]]).byte()
    matrix = ExpertMatrix(values=pack_e2m1(codes)[None], scale=pack_ue8m0(by_group), group_size=32)
    got = TorchGemm().gemm_nt(lhs, lhs_scale, TorchGemm().load(matrix), 128)
    # 1 + 2 + 4 + 8 = 15 in each half; the second is scaled by 2^4.
    assert got.tolist() == [[15.0 + 15.0 * 16]]

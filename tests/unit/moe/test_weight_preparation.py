"""Load-time layouts: what stays as it is and what is rounded a second time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import decode_e4m3, shared_recipe, unpack_ue8m0
from moe.quant.e2m1 import pack_e2m1
from moe.quant.mxfp import quantize_mxfp8
from moe.quant.ue8m0 import unpack_ue8m0 as exponents_of
from moe.weight_preparation import (
    prepare_blocks,
    prepare_mxfp4,
    prepare_mxfp4_as_fp8,
    prepare_mxfp8,
    prepare_per_tensor,
    prepare_weights,
    requantize_ue8m0,
)
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights
from reports.verdict.decode import decode_matrix
from reports.verdict.golden_matrix import prepared_matrix
from tests.unit.moe.checkpoint_matrices import checkpoint_matrix

EXPERTS, HIDDEN, INTERMEDIATE = 2, 384, 256
FP32, UE8M0 = ScaleFormat.FP32, ScaleFormat.UE8M0
PATHS = [
    (QuantRecipe.BF16, ScaleFormat.NONE),
    (QuantRecipe.FP8_BLOCK128, FP32),
    (QuantRecipe.FP8_BLOCK128, UE8M0),
    (QuantRecipe.FP8_PER_TENSOR, FP32),
    (QuantRecipe.FP8_PER_TENSOR, UE8M0),
    (QuantRecipe.MXFP8, UE8M0),
    (QuantRecipe.MXFP4_W4A8, UE8M0),
    (QuantRecipe.MXFP4_AS_FP8, FP32),
    (QuantRecipe.MXFP4_AS_FP8, UE8M0),
]
EVERY_PATH = pytest.mark.parametrize(
    ("recipe", "scale_format"), PATHS, ids=[f"{recipe}-{scales}" for recipe, scales in PATHS]
)
NAMES = pytest.mark.parametrize("name", ["w13", "w2", "shared.w13", "shared.w2"])


def expert_weights(
    recipe: QuantRecipe, seed: int, experts: int, scale_format: ScaleFormat
) -> ExpertWeights:
    gate_up = (0.5, 0.125) if scale_format is UE8M0 else (0.3, 0.07)
    return ExpertWeights(
        w13=checkpoint_matrix(recipe, seed, (experts, 2 * INTERMEDIATE, HIDDEN), gate_up),
        w2=checkpoint_matrix(recipe, seed + 1, (experts, HIDDEN, INTERMEDIATE), gate_up[:1]),
    )


def layer(recipe: QuantRecipe, scale_format: ScaleFormat) -> LayerWeights:
    return LayerWeights(
        expert_ids=torch.tensor([4, 5]),
        experts=expert_weights(recipe, 1, EXPERTS, scale_format),
        shared=expert_weights(shared_recipe(recipe), 5, 1, scale_format),
        gate_weight=torch.ones(8, HIDDEN, dtype=torch.bfloat16),
        correction_bias=torch.arange(8.0),
    )


def matrices(weights: LayerWeights) -> dict[str, ExpertMatrix]:
    assert weights.shared is not None
    return {
        "w13": weights.experts.w13,
        "w2": weights.experts.w2,
        "shared.w13": weights.shared.w13,
        "shared.w2": weights.shared.w2,
    }


def one_expert(matrix: ExpertMatrix, index: int) -> ExpertMatrix:
    scale = None if matrix.scale is None else matrix.scale[index : index + 1]
    return replace(matrix, values=matrix.values[index : index + 1], scale=scale)


def bytes_of(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@EVERY_PATH
@NAMES
def test_every_recipe_prepares_what_the_golden_does(recipe, scale_format, name):
    checkpoint = layer(recipe, scale_format)
    before = matrices(checkpoint)[name]
    after = matrices(prepare_weights(checkpoint, recipe, scale_format))[name]
    own = shared_recipe(recipe) if name.startswith("shared") else recipe
    for index in range(len(before.values)):
        got = one_expert(after, index)
        scale = None if got.scale is None else got.scale[0]
        assert torch.equal(
            decode_matrix(got.values[0], scale, got.group_size),
            prepared_matrix(one_expert(before, index), own, scale_format),
        )


@EVERY_PATH
def test_gate_and_bias_pass_unchanged(recipe, scale_format):
    given = layer(recipe, scale_format)
    got = prepare_weights(given, recipe, scale_format)
    assert got.gate_weight is given.gate_weight
    assert got.correction_bias is given.correction_bias


def test_a_layer_without_a_shared_expert_has_none_afterwards():
    given = replace(layer(QuantRecipe.FP8_BLOCK128, UE8M0), shared=None)
    assert prepare_weights(given, QuantRecipe.FP8_BLOCK128, UE8M0).shared is None


@pytest.mark.parametrize(("recipe", "scale_format"), PATHS[:2], ids=["bf16", "fp8-fp32-scales"])
def test_weights_that_the_gemm_reads_already_are_kept(recipe, scale_format):
    given = layer(recipe, scale_format)
    got = matrices(prepare_weights(given, recipe, scale_format))
    assert all(got[name] is matrix for name, matrix in matrices(given).items())


def e4m3(*values: float) -> Tensor:
    """[1, 1, 128] codes: the values, then zeros."""
    row = torch.zeros(1, 1, 128)
    row[0, 0, : len(values)] = torch.tensor(values)
    return row.to(torch.float8_e4m3fn)


def test_requantising_rounds_the_scale_up_and_the_codes_again():
    # 448 * 3 needs the scale 4: 336 is a tie between 320 and 352 and goes to the even 320.
    blocks = ExpertMatrix(values=e4m3(448.0, 1.0), scale=torch.full((1, 1, 1), 3.0))
    got = prepare_blocks(blocks, UE8M0)
    assert got.values[0, 0, :2].float().tolist() == [320.0, 0.75]
    assert unpack_ue8m0(got.scale, 1).tolist() == [[[4.0]]]


def test_a_scale_that_is_a_power_of_two_survives_with_its_codes():
    # The block holds a 448, so its scale cannot change; products with 2^-3 are exact in bf16.
    codes = torch.randint(-7, 8, (1, 128, 128), generator=torch.Generator().manual_seed(1)).float()
    codes[0, 0, 0] = 448
    before = ExpertMatrix(values=codes.to(torch.float8_e4m3fn), scale=torch.full((1, 1, 1), 0.125))
    after = requantize_ue8m0(before)
    assert torch.equal(bytes_of(after.values), bytes_of(before.values))
    assert unpack_ue8m0(after.scale, 1).unique().tolist() == [0.125]


def test_rows_that_end_inside_a_block_keep_its_scale():
    got = requantize_ue8m0(checkpoint_matrix(QuantRecipe.FP8_BLOCK128, 9, (1, 200, 256)))
    scales = unpack_ue8m0(got.scale[0], 2)
    assert got.scale.stride() == (200, 1, 200)
    assert torch.equal(scales[128], scales[199])


def halves(gate: Tensor, up: Tensor, scales: tuple[float, float]) -> ExpertMatrix:
    return ExpertMatrix(values=torch.cat([gate, up], dim=1), scale=torch.tensor([scales]))


@pytest.mark.parametrize("scale_format", [FP32, UE8M0])
def test_the_larger_scale_of_gate_and_up_wins_and_the_other_half_is_rounded_again(scale_format):
    # Over twice the scale, 3 * 2^-9 is a tie between 2^-9 and 2^-8 that goes to the even 2^-8.
    part = e4m3(448.0, 1.125, 2.0**-9, 3 * 2.0**-9)
    got = prepare_per_tensor(halves(part, part, (0.5, 0.25)), scale_format)
    gate, up = got.values[0, :, :4].float().tolist()
    assert gate == [448.0, 1.125, 2.0**-9, 3 * 2.0**-9]
    assert up == [224.0, 0.5625, 0.0, 2.0**-8]
    stored = unpack_ue8m0(got.scale, 1) if scale_format is UE8M0 else got.scale
    assert stored.unique().tolist() == [0.5]


def test_merged_codes_pass_through_fp16_those_of_the_larger_scale_too():
    # 2^-26 vanishes in fp16, and 3 * 2^-26 becomes its smallest number 2^-24.
    part = e4m3(2.0**-9, 3 * 2.0**-9, 1.0)
    got = prepare_per_tensor(halves(part, part, (2.0**-17, 2.0**-18)), FP32)
    assert got.values[0, 0, :3].float().tolist() == [0.0, 2.0**-7, 1.0]


def test_a_matrix_of_one_part_keeps_its_codes():
    one = ExpertMatrix(values=e4m3(2.0**-9, 3 * 2.0**-9), scale=torch.tensor([[2.0**-17]]))
    assert prepare_per_tensor(one, FP32).values is one.values


def test_a_scale_a_tensor_is_repeated_for_every_block():
    codes = torch.zeros(2, 200, 384).to(torch.float8_e4m3fn)
    got = prepare_per_tensor(ExpertMatrix(values=codes, scale=torch.tensor([[0.3], [0.7]])), FP32)
    assert (got.scale.shape, got.scale.is_contiguous()) == ((2, 2, 3), True)
    assert torch.equal(got.scale, torch.tensor([0.3, 0.7])[:, None, None].expand(2, 2, 3))


BYTES = torch.tensor([[[1, 2, 3, 4, 5], [251, 252, 253, 254, 255], [0, 127, 9, 8, 7]]]).byte()
WORDS = [[0x04030201, 5], [0xFEFDFCFB - (1 << 32), 255], [0x08097F00, 7]]


@pytest.mark.parametrize(
    ("prepare", "values"),
    [
        (prepare_mxfp8, torch.zeros(1, 3, 160).to(torch.float8_e4m3fn)),
        (prepare_mxfp4, torch.zeros(1, 3, 80, dtype=torch.uint8)),
    ],
    ids=["mxfp8", "mxfp4"],
)
def test_the_bytes_of_microscales_are_packed_as_they_are(prepare, values):
    got = prepare(ExpertMatrix(values=values, scale=BYTES, group_size=32), UE8M0)
    assert (got.scale.tolist(), got.group_size) == ([WORDS], 32)
    assert got.values is values


def test_packed_scales_have_rows_along_the_fastest_axis_and_zeros_behind_each_column():
    values = torch.zeros(1, 3, 160).to(torch.float8_e4m3fn)
    got = prepare_mxfp8(ExpertMatrix(values=values, scale=BYTES, group_size=32), UE8M0)
    assert got.scale.stride() == (8, 1, 4)
    storage = got.scale.as_strided((2, 4), (4, 1))
    assert storage.tolist() == [[row[column] for row in WORDS] + [0] for column in range(2)]


def test_a_bf16_checkpoint_of_mxfp8_is_quantised_to_the_stored_one():
    values = checkpoint_matrix(QuantRecipe.BF16, 13, (2, 64, 96)).values
    codes, scale = quantize_mxfp8(values)
    online = prepare_mxfp8(ExpertMatrix(values=values, scale=None), UE8M0)
    stored = prepare_mxfp8(ExpertMatrix(values=codes, scale=scale, group_size=32), UE8M0)
    assert torch.equal(bytes_of(online.values), bytes_of(stored.values))
    assert torch.equal(online.scale, stored.scale)
    assert online.group_size == 32


@pytest.mark.parametrize("index", [0, 1])
def test_a_bf16_checkpoint_of_mxfp8_is_quantised_as_by_the_golden(index):
    before = checkpoint_matrix(QuantRecipe.BF16, 13, (2, 64, 96))
    got = prepare_mxfp8(before, UE8M0)
    assert torch.equal(
        decode_matrix(got.values[index], got.scale[index], 32),
        prepared_matrix(one_expert(before, index), QuantRecipe.MXFP8, UE8M0),
    )


@pytest.mark.parametrize("scale_format", [FP32, UE8M0])
def test_fp4_turned_into_fp8_has_64_times_its_codes_under_the_largest_group(scale_format):
    # Code 7 is 6; the first group's scale is 1, the second's 2^-6; the rest are zeros.
    packed = pack_e2m1(torch.tensor([7] * 64, dtype=torch.uint8).view(1, 1, 64))
    given = ExpertMatrix(values=packed, scale=torch.tensor([[[127, 121]]]).byte(), group_size=32)
    got = prepare_mxfp4_as_fp8(given, scale_format)
    assert decode_e4m3(bytes_of(got.values))[0, 0, ::32].tolist() == [384.0, 6.0]
    stored = unpack_ue8m0(got.scale, 1) if scale_format is UE8M0 else got.scale
    assert (stored.unique().tolist(), got.group_size) == ([2.0**-6], 128)


@NAMES
def test_block_scales_are_packed_one_row_of_them_for_each_output_row(name):
    checkpoint = layer(QuantRecipe.FP8_BLOCK128, UE8M0)
    got = matrices(prepare_weights(checkpoint, QuantRecipe.FP8_BLOCK128, UE8M0))[name]
    experts, n, k = got.values.shape
    by_row = exponents_of(got.scale, k // 128)
    assert got.scale.stride() == (n, 1, n)
    assert by_row.shape == (experts, n, k // 128)
    assert torch.equal(by_row[:, :128], by_row[:, :1].expand(-1, 128, -1))

"""Stored numbers of every form: as the recipe reads them and as exact values, by hand."""

import re

import pytest
import torch
from safetensors.torch import save_file

from moe.recipes import WeightFormat
from scenarios.checkpoint_files import CheckpointError, TensorReader, stored_tensors
from scenarios.checkpoint_forms import StoredMatrix
from scenarios.checkpoint_values import exact_matrix, read_matrix

FP4_BYTES = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
FP4_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture
def stored(tmp_path):
    """Save values and, if given, a scale; return where they lie."""

    def save(values, scale=None, **more):
        path = tmp_path / "model.safetensors"
        tensors = {"w": values} if scale is None else {"w": values, "w_scale": scale}
        save_file(tensors, path)
        headers, _ = stored_tensors(dict.fromkeys(tensors, path))
        return StoredMatrix(values=headers["w"], scale=headers.get("w_scale"), **more)

    return save


def read(matrix, form, **options):
    with TensorReader() as reader:
        return read_matrix(reader, matrix, form, **options)


def exact(matrix, form):
    with TensorReader() as reader:
        return exact_matrix(reader, matrix, form)


def e4m3(rows):
    return torch.tensor(rows).to(torch.float8_e4m3fn)


def exponents(rows):
    return torch.tensor(rows, dtype=torch.uint8)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


ROWS = [[1.0] * 32 + [-2.0] * 32, [448.0] * 32 + [0.5] * 32]


@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale_a_matrix_is_read_as_one_fp32_number(stored, shape, dtype):
    scale = torch.tensor(0.75, dtype=dtype).view(shape)
    matrix = read(stored(e4m3(ROWS), scale), WeightFormat.FP8_PER_TENSOR)
    assert torch.equal(bits(matrix.values[0]), bits(e4m3(ROWS)))
    assert (matrix.scale.dtype, matrix.scale.tolist()) == (torch.float32, [[0.75]])


@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "vector"])
def test_one_scale_a_matrix_multiplies_every_code(stored, shape):
    scale = torch.tensor(0.75).view(shape)
    values = exact(stored(e4m3(ROWS), scale), WeightFormat.FP8_PER_TENSOR)
    assert values.dtype == torch.float64
    assert values.tolist() == [[0.75] * 32 + [-1.5] * 32, [336.0] * 32 + [0.375] * 32]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=["U8", "F8_E8M0"])
def test_scales_of_groups_are_read_as_bytes(stored, dtype):
    scale = exponents([[128, 126], [0, 254]])
    matrix = read(stored(e4m3(ROWS), scale.view(dtype)), WeightFormat.MXFP8)
    assert torch.equal(bits(matrix.values[0]), bits(e4m3(ROWS)))
    assert (matrix.scale.dtype, matrix.scale.tolist()) == (torch.uint8, [[[128, 126], [0, 254]]])
    assert matrix.group_size == 32


def test_scales_of_groups_multiply_their_32_columns(stored):
    scale = exponents([[128, 126], [0, 254]])
    values = exact(stored(e4m3(ROWS), scale), WeightFormat.MXFP8)
    assert values.tolist() == [
        [2.0] * 32 + [-1.0] * 32,
        [448 * 2.0**-127] * 32 + [0.5 * 2.0**127] * 32,
    ]


def test_power_of_two_scales_of_blocks_become_fp32(stored):
    scale = exponents([[128, 0]]).view(torch.float8_e8m0fnu)
    matrix = stored(torch.ones(1, 256).to(torch.float8_e4m3fn), scale)
    assert read(matrix, WeightFormat.FP8_BLOCK128).scale.tolist() == [[[2.0, 2.0**-127]]]
    assert exact(matrix, WeightFormat.FP8_BLOCK128).tolist() == [[2.0] * 128 + [2.0**-127] * 128]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8], ids=["U8", "I8"])
def test_packed_fp4_is_read_as_bytes(stored, dtype):
    packed = exponents([FP4_BYTES * 2])
    matrix = read(stored(packed.view(dtype), exponents([[127]])), WeightFormat.MXFP4)
    assert (matrix.values.dtype, matrix.values.tolist()) == (torch.uint8, [[FP4_BYTES * 2]])
    assert (matrix.in_features, matrix.group_size) == (32, 32)


@pytest.mark.parametrize("byte", [0, 127, 252])
def test_packed_fp4_stands_for_its_value_times_a_power_of_two(stored, byte):
    matrix = stored(exponents([FP4_BYTES * 2]).view(torch.int8), exponents([[byte]]))
    factor = 2.0 ** (byte - 127)
    assert exact(matrix, WeightFormat.MXFP4).tolist() == [[v * factor for v in FP4_VALUES * 2]]


def test_bf16_under_mxfp8_stays_for_load_time_preparation(stored):
    values = torch.tensor(ROWS, dtype=torch.bfloat16)
    matrix = read(stored(values), WeightFormat.MXFP8)
    assert torch.equal(matrix.values, values[None])
    assert matrix.scale is None


def test_bf16_with_one_scale_a_matrix_is_quantised_part_by_part(stored):
    values = torch.tensor([[7.0] * 32, [-14.0] * 32], dtype=torch.bfloat16)
    matrix = read(stored(values), WeightFormat.FP8_PER_TENSOR, parts=2)
    assert matrix.scale.tolist() == [[0.015625, 0.03125]]
    assert matrix.values.float().tolist() == [[[448.0] * 32, [-448.0] * 32]]


def test_bf16_is_quantised_with_a_power_of_two_where_that_is_wanted(stored):
    values = torch.tensor([[8.0] * 32], dtype=torch.bfloat16)
    matrix = read(stored(values), WeightFormat.FP8_PER_TENSOR, power_of_two_scales=True)
    assert matrix.scale.tolist() == [[0.03125]]
    assert matrix.values.float().unique().tolist() == [256.0]


@pytest.mark.parametrize("form", WeightFormat)
def test_bf16_values_stand_for_themselves(stored, form):
    values = torch.tensor(ROWS, dtype=torch.bfloat16)
    assert exact(stored(values), form).tolist() == ROWS


def gate_and_up_in_turns():
    """Expert 1 of two: rows gate 0, up 0, gate 1, up 1, each of one byte and scales of its own."""
    rows = exponents([[0x22], [0x44], [0x33], [0x55]])
    scales = exponents([[127], [128], [129], [130]])
    blocks = rows.repeat(1, 16).view(1, 4, 1, 16)
    return torch.cat([torch.zeros_like(blocks), blocks]), torch.stack([scales * 0, scales])


def test_rows_that_take_turns_are_read_gate_first(stored):
    matrix = stored(*gate_and_up_in_turns(), expert=1, interleaved=True)
    w13 = read(matrix, WeightFormat.MXFP4)
    assert w13.values.tolist() == [[[byte] * 16 for byte in (0x22, 0x33, 0x44, 0x55)]]
    assert w13.scale.tolist() == [[[127], [129], [128], [130]]]


def test_rows_that_take_turns_stand_for_gate_then_up(stored):
    matrix = stored(*gate_and_up_in_turns(), expert=1, interleaved=True)
    rows = exact(matrix, WeightFormat.MXFP4)
    assert rows.tolist() == [[value] * 32 for value in (1.0, 1.5 * 4, 2.0 * 2, 3.0 * 8)]


READERS = pytest.mark.parametrize("reads", [read, exact])


@READERS
def test_a_scale_byte_255_is_an_error_that_names_the_tensor_and_the_place(stored, reads):
    matrix = stored(e4m3(ROWS), exponents([[128, 126], [0, 255]]))
    with pytest.raises(CheckpointError, match=r"w_scale: the scale at \[1, 1\] is NaN"):
        reads(matrix, WeightFormat.MXFP8)


def test_a_nan_in_a_fused_scale_names_the_expert_first(stored):
    blocks, scales = gate_and_up_in_turns()
    scales[1, 2, 0] = 255
    matrix = stored(blocks, scales, expert=1, interleaved=True)
    with pytest.raises(CheckpointError, match=r"w_scale: the scale at \[1, 2, 0\] is NaN"):
        read(matrix, WeightFormat.MXFP4)


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 0.0, -1.0])
@READERS
def test_one_scale_a_matrix_must_be_a_positive_number(stored, reads, scale):
    matrix = stored(e4m3(ROWS), torch.tensor([scale]))
    with pytest.raises(CheckpointError, match=r"w_scale: the scale at \[0\] is .*; wanted a pos"):
        reads(matrix, WeightFormat.FP8_PER_TENSOR)


@READERS
def test_a_negative_scale_of_a_block_is_an_error(stored, reads):
    matrix = stored(torch.ones(1, 256).to(torch.float8_e4m3fn), torch.tensor([[1.0, -1.0]]))
    with pytest.raises(CheckpointError, match=r"w_scale: the scale at \[0, 1\] is -1"):
        reads(matrix, WeightFormat.FP8_BLOCK128)


@pytest.mark.parametrize("form", [form for form in WeightFormat if form != WeightFormat.MXFP4])
@READERS
def test_bf16_without_a_number_is_an_error_in_every_form(stored, reads, form):
    values = torch.tensor(ROWS, dtype=torch.bfloat16)
    values[1, 40] = torch.inf
    with pytest.raises(CheckpointError, match=r": w: the value at \[1, 40\] is inf"):
        reads(stored(values), form)


@READERS
def test_a_code_that_is_nan_is_an_error(stored, reads):
    codes = bits(e4m3(ROWS))
    codes[0, 33] = 0xFF
    matrix = stored(codes.view(torch.float8_e4m3fn), exponents([[127, 127]] * 2))
    with pytest.raises(CheckpointError, match=r": w: the value at \[0, 33\] is NaN"):
        reads(matrix, WeightFormat.MXFP8)


OVERFLOWING = {
    "one scale": (e4m3(ROWS), torch.tensor(2.0**120), WeightFormat.FP8_PER_TENSOR, "[1, 0]"),
    "block": (e4m3(ROWS), torch.tensor([[2.0**127]]), WeightFormat.FP8_BLOCK128, "[0, 32]"),
    "mxfp8": (e4m3(ROWS), exponents([[254, 127]] * 2), WeightFormat.MXFP8, "[1, 0]"),
    "mxfp4 253": (exponents([FP4_BYTES * 2]), exponents([[253]]), WeightFormat.MXFP4, "[0, 6]"),
    "mxfp4 254": (exponents([FP4_BYTES * 2]), exponents([[254]]), WeightFormat.MXFP4, "[0, 4]"),
}


@pytest.mark.parametrize("case", OVERFLOWING)
@READERS
def test_a_value_that_its_scale_carries_out_of_bf16_is_an_error(stored, reads, case):
    values, scale, form, place = OVERFLOWING[case]
    matrix = stored(values, scale)
    with pytest.raises(CheckpointError, match=f": w: the value at {re.escape(place)} overflows"):
        reads(matrix, form)


def test_a_large_scale_of_a_block_with_small_codes_is_read(stored):
    values = torch.ones(1, 256).to(torch.float8_e4m3fn)
    matrix = read(stored(values, torch.tensor([[1.0, 2.0**127]])), WeightFormat.FP8_BLOCK128)
    assert matrix.scale.tolist() == [[[1.0, 2.0**127]]]

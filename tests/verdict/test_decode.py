"""What codes and scales stand for: hand-written bytes, every storage of scales."""

import math

import pytest
import torch

from reports.verdict.decode import (
    codes_f64,
    decode_matrix,
    dequantized,
    fp4_f64,
    scales_f64,
    spread_blocks,
)


def e4m3(*shape: int, value: float = 2.0) -> torch.Tensor:
    return torch.full(shape, value).to(torch.float8_e4m3fn)


def words(*rows: tuple[int, ...]) -> torch.Tensor:
    """[R, W] int32 of rows of exponent bytes, the first one lowest."""
    return torch.tensor(rows, dtype=torch.uint8).view(torch.int32)


def test_codes_are_read_by_the_formats_own_table():
    codes = torch.tensor([0x00, 0x01, 0x38, 0xB8, 0x7E], dtype=torch.uint8)
    values = codes_f64(codes.view(torch.float8_e4m3fn))
    assert values.tolist() == [0.0, 2.0**-9, 1.0, -1.0, 448.0]


def test_fp4_codes_are_read_low_half_first():
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert fp4_f64(packed).tolist() == [positive, [-value for value in positive]]


def test_the_ninth_fp4_code_is_a_negative_zero():
    assert math.copysign(1, fp4_f64(torch.tensor([[0x08]], dtype=torch.uint8))[0, 0]) == -1


def test_packed_scales_are_read_lowest_byte_first():
    assert scales_f64(words((126, 127, 130, 0)), 3).tolist() == [[0.5, 1.0, 8.0]]


def test_a_fifth_packed_scale_is_the_first_byte_of_the_second_word():
    packed = words((127, 127, 127, 127, 129, 0, 0, 0))
    assert scales_f64(packed, 5).tolist() == [[1.0, 1.0, 1.0, 1.0, 4.0]]


def test_packed_scales_are_read_alike_in_columns():
    packed = words((126, 127, 128, 129, 130, 0, 0, 0), (1, 2, 3, 4, 5, 0, 0, 0))
    in_columns = packed.T.contiguous().T
    assert in_columns.stride() == (1, 2)
    assert torch.equal(scales_f64(in_columns, 5), scales_f64(packed, 5))


@pytest.mark.parametrize(
    ("group_size", "at"),
    [(128, [0, 127, 128, 255]), (32, [0, 31, 32, 63])],
)
@pytest.mark.parametrize("packed", [False, True], ids=["fp32", "packed"])
def test_rows_are_multiplied_group_by_group(packed, group_size, at):
    scale = words((126, 129, 0, 0)) if packed else torch.tensor([[0.5, 4.0]])
    values = dequantized(e4m3(1, 2 * group_size), scale, group_size)
    assert values[0, at].tolist() == [1.0, 1.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("columns", "group_size"), [(256, 128), (64, 32)], ids=["groups of 128", "groups of 32"]
)
def test_no_rows_have_no_values(columns, group_size):
    scale = torch.zeros(0, 2)
    assert dequantized(e4m3(0, columns), scale, group_size).shape == (0, columns)


def test_bf16_rows_are_read_as_they_are():
    rows = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    assert dequantized(rows, None, 128).tolist() == [[1.5, -2.0]]


def test_a_bf16_matrix_is_read_as_it_is():
    values = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    assert decode_matrix(values, None, 128).tolist() == [[1.5, -2.0]]


def test_an_fp8_matrix_in_blocks_is_multiplied_block_by_block():
    """129 x 130: the last row and the last two columns lie in blocks of their own."""
    values = decode_matrix(e4m3(129, 130), torch.tensor([[1.0, 3.0], [5.0, 7.0]]), 128)
    assert values[[0, 127, 128], 127].tolist() == [2.0, 2.0, 10.0]
    assert values[[0, 127, 128], 128].tolist() == [6.0, 6.0, 14.0]


@pytest.mark.parametrize(("group_size", "columns"), [(128, 256), (32, 64)])
def test_an_fp8_matrix_with_packed_scales_is_multiplied_row_by_row(group_size, columns):
    scale = words((127, 130, 0, 0), (126, 128, 0, 0))
    values = decode_matrix(e4m3(2, columns), scale, group_size)
    assert values[:, [0, group_size - 1]].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    assert values[:, [group_size, columns - 1]].tolist() == [[16.0, 16.0], [4.0, 4.0]]


def test_an_fp4_matrix_has_two_columns_a_byte_and_a_scale_for_32():
    packed = torch.full((1, 32), 0x72, dtype=torch.uint8)  # 1, 6, 1, 6, ...
    values = decode_matrix(packed, words((126, 129, 0, 0)), 32)
    assert values.shape == (1, 64)
    assert values[0, [0, 1, 31, 32, 33, 63]].tolist() == [0.5, 3.0, 3.0, 4.0, 24.0, 24.0]


def test_a_matrix_that_ends_within_a_group_is_read_to_its_end():
    values = decode_matrix(e4m3(1, 130), words((127, 128, 0, 0)), 128)
    assert values.shape == (1, 130)
    assert values[0, [127, 128, 129]].tolist() == [2.0, 4.0, 4.0]


def test_blocks_are_spread_over_the_cells_that_they_cover():
    spread = spread_blocks(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.Size((130, 129)))
    assert spread.shape == (130, 129)
    assert spread[[127, 128], [127, 128]].tolist() == [1.0, 4.0]
    assert spread[[127, 128], [128, 127]].tolist() == [2.0, 3.0]

"""Exponent bytes and their packed layout, over every byte."""

import ml_dtypes
import numpy as np
import pytest
import torch

from moe.quant.ue8m0 import (
    exponent_rounded_up,
    mn_major,
    pack_ue8m0,
    reciprocal_from_exponent,
    row_major,
    scale_from_exponent,
    unpack_ue8m0,
)

ALL_BYTES = np.arange(256, dtype=np.uint8)
NORMAL_BYTES = np.arange(1, 255)
POWERS = np.exp2(NORMAL_BYTES.astype(np.float64) - 127).astype(np.float32)


def numbered(*shape: int) -> torch.Tensor:
    """uint8 bytes that differ from their neighbours; none of them zero."""
    return (torch.arange(int(np.prod(shape))) % 251 + 1).to(torch.uint8).view(shape)


def test_an_exact_power_of_two_keeps_its_exponent():
    assert exponent_rounded_up(torch.from_numpy(POWERS)).tolist() == NORMAL_BYTES.tolist()


def test_the_next_float_above_a_power_goes_up():
    above = np.nextafter(POWERS, np.float32(np.inf))
    assert exponent_rounded_up(torch.from_numpy(above)).tolist() == (NORMAL_BYTES + 1).tolist()


def test_the_next_float_below_a_power_goes_up_to_it():
    below = np.nextafter(POWERS[1:], np.float32(0))
    assert exponent_rounded_up(torch.from_numpy(below)).tolist() == NORMAL_BYTES[1:].tolist()


def test_infinity_has_the_byte_of_nan():
    assert exponent_rounded_up(torch.tensor([torch.inf])).tolist() == [255]


def test_every_byte_decodes_as_in_ml_dtypes():
    expected = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(scale_from_exponent(torch.from_numpy(ALL_BYTES)), expected)


def test_every_reciprocal_is_the_exact_power():
    expected = [2.0 ** (127 - byte) for byte in range(256)]
    assert reciprocal_from_exponent(torch.from_numpy(ALL_BYTES)).tolist() == expected


def test_the_first_group_lies_in_the_lowest_byte():
    exponents = torch.tensor([[0x11, 0x22, 0x33, 0x44, 0x55]], dtype=torch.uint8)
    assert pack_ue8m0(exponents).tolist() == [[0x44332211, 0x00000055]]


def test_a_byte_of_128_and_more_in_the_last_place_makes_a_negative_word():
    exponents = torch.tensor([[0, 0, 0, 0x80]], dtype=torch.uint8)
    assert pack_ue8m0(exponents).tolist() == [[-(2**31)]]


@pytest.mark.parametrize(
    ("rows", "groups", "shape", "strides"),
    [
        (1, 1, (1, 1), (1, 4)),
        (3, 4, (3, 1), (1, 4)),
        (4, 5, (4, 2), (1, 4)),
        (5, 8, (5, 2), (1, 8)),
        (128, 56, (128, 14), (1, 128)),
    ],
    ids=lambda value: str(value),
)
def test_packed_words_lie_column_by_column_each_padded_to_four_rows(rows, groups, shape, strides):
    packed = pack_ue8m0(numbered(rows, groups))
    assert (packed.shape, packed.stride(), packed.dtype) == (shape, strides, torch.int32)


def test_the_padding_rows_of_a_column_are_zero():
    packed = pack_ue8m0(numbered(5, 8))
    columns = packed.as_strided((2, 8), (8, 1))
    assert columns[:, 5:].tolist() == [[0, 0, 0]] * 2


def test_bytes_past_the_last_group_are_zero():
    words = row_major(pack_ue8m0(numbered(3, 6))).view(torch.uint8)
    assert words[:, 6:].tolist() == [[0, 0]] * 3


def test_batches_are_packed_each_on_its_own():
    exponents = numbered(2, 5, 8)
    packed = pack_ue8m0(exponents)
    assert packed.stride() == (16, 1, 8)
    assert all(torch.equal(packed[i], pack_ue8m0(exponents[i])) for i in range(2))


@pytest.mark.parametrize(
    "shape",
    [(1, 1), (7, 1), (7, 4), (8, 5), (0, 5), (2, 3, 9), (2, 0, 4)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_unpacking_gives_the_packed_bytes_back(shape):
    exponents = numbered(*shape)
    assert torch.equal(unpack_ue8m0(pack_ue8m0(exponents), shape[-1]), exponents)


def test_unpacking_reads_a_slice_of_rows():
    exponents = numbered(9, 6)
    assert torch.equal(unpack_ue8m0(pack_ue8m0(exponents)[2:5], 6), exponents[2:5])


def test_unpacking_reads_the_row_major_layout():
    exponents = numbered(5, 8)
    assert torch.equal(unpack_ue8m0(exponents.view(torch.int32), 8), exponents)


@pytest.mark.parametrize("width", [1, 3])
def test_row_major_undoes_mn_major_strides(width):
    words = torch.arange(5 * width, dtype=torch.int32).view(5, width)
    restored = row_major(mn_major(words))
    assert restored.stride() == (width, 1)
    assert torch.equal(restored, words)

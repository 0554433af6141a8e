"""Codes of e2m1 against hand-written literals, and two of them in a byte over every byte."""

import math

import pytest
import torch

from moe.quant.e2m1 import (
    e2m1_to_fp32,
    pack_e2m1,
    round_to_e2m1,
    unpack_e2m1,
    unpacked_e2m1_to_fp32,
)

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
SIGNS = pytest.mark.parametrize("sign", [0, 8], ids=["positive", "negative"])


def code_of(value: float) -> int:
    return round_to_e2m1(torch.tensor([value])).item()


@SIGNS
@pytest.mark.parametrize("code", range(8))
def test_a_code_decodes_to_its_value(code, sign):
    decoded = e2m1_to_fp32(torch.tensor([code + sign], dtype=torch.uint8)).item()
    assert (abs(decoded), math.copysign(1, decoded)) == (VALUES[code], -1 if sign else 1)


@SIGNS
@pytest.mark.parametrize("code", range(8))
def test_the_value_of_a_code_rounds_to_it(code, sign):
    assert code_of(-VALUES[code] if sign else VALUES[code]) == code + sign


@SIGNS
@pytest.mark.parametrize(
    ("tie", "code"), [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)]
)
def test_a_tie_goes_to_the_even_code(tie, code, sign):
    assert code_of(-tie if sign else tie) == code + sign


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (7.0, 7),
        (3e38, 7),
        (math.inf, 7),
        (-6.1, 15),
        (-math.inf, 15),
        (math.nan, 7),
        (math.copysign(math.nan, -1.0), 7),
    ],
    ids=["7", "3e38", "inf", "-6.1", "-inf", "nan", "-nan"],
)
def test_what_the_format_cannot_hold_saturates_and_nan_becomes_6(value, code):
    assert code_of(value) == code


def test_a_negative_value_that_vanishes_keeps_its_sign():
    assert code_of(-1e-45) == 8


def test_rounding_leaves_its_argument_alone():
    values = torch.tensor([math.nan, -math.inf, 0.3])
    before = values.clone()
    round_to_e2m1(values)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


def test_bf16_is_rounded_as_fp32():
    assert round_to_e2m1(torch.tensor([2.5, -5.0], dtype=torch.bfloat16)).tolist() == [4, 14]


def test_the_earlier_column_lies_in_the_low_half():
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0]], dtype=torch.uint8)
    assert pack_e2m1(codes).tolist() == [[0x21, 0x0F]]


def test_unpacking_starts_with_the_low_half():
    assert unpack_e2m1(torch.tensor([0x21, 0x8F], dtype=torch.uint8)).tolist() == [1, 2, 15, 8]


def test_every_byte_survives_unpacking_and_packing():
    assert torch.equal(pack_e2m1(unpack_e2m1(ALL_BYTES)), ALL_BYTES)


def test_every_byte_decodes_to_its_low_and_its_high_half():
    signed = VALUES + [-value for value in VALUES]
    expected = [[signed[byte % 16], signed[byte // 16]] for byte in range(256)]
    assert unpacked_e2m1_to_fp32(ALL_BYTES[:, None]).tolist() == expected


def test_a_transposed_tensor_decodes_in_its_own_order():
    packed = torch.tensor([[0x21, 0x43], [0x65, 0x07]], dtype=torch.uint8).T
    assert unpacked_e2m1_to_fp32(packed).tolist() == [[0.5, 1.0, 3.0, 4.0], [1.5, 2.0, 6.0, 0.0]]


def test_no_rows_decode_to_no_rows():
    assert unpacked_e2m1_to_fp32(torch.zeros(3, 0, 8, dtype=torch.uint8)).shape == (3, 0, 16)


def test_an_odd_number_of_columns_is_refused():
    with pytest.raises(ValueError, match="5 columns do not pack two to a byte"):
        pack_e2m1(torch.zeros(2, 5, dtype=torch.uint8))

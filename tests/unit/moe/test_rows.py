"""Whole rows keep their bytes wherever they go; what they do not cover is poison, or zero."""

import pytest
import torch

from moe.quant.ue8m0 import mn_major
from moe.rows import spread_rows, spread_scales, take_rows

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.uint8]


def rows(dtype: torch.dtype, width: int) -> torch.Tensor:
    codes = torch.arange(3 * width * dtype.itemsize, dtype=torch.uint8)
    return codes.view(3, -1).view(dtype)


def as_bytes(tensor: torch.Tensor) -> list[list[int]]:
    return tensor.contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_taken_rows_keep_their_bytes(dtype, width):
    taken = take_rows(rows(dtype, width), torch.tensor([2, 0, 2]))
    whole = as_bytes(rows(dtype, width))
    assert taken.dtype == dtype
    assert as_bytes(taken) == [whole[2], whole[0], whole[2]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_spread_rows_stand_at_their_places_between_poison(dtype, width):
    spread = spread_rows(rows(dtype, width), torch.tensor([4, 1, 2]), 5)
    whole = as_bytes(rows(dtype, width))
    assert [as_bytes(spread)[place] for place in (4, 1, 2)] == whole
    untouched = spread.to(torch.float32)[[0, 3]] if dtype.is_floating_point else spread[[0, 3]]
    if dtype.is_floating_point:
        assert untouched.isnan().all()
    else:
        assert (untouched == torch.iinfo(dtype).max).all()


def test_packed_scales_stay_mn_major_and_their_padding_is_zero():
    words = mn_major(torch.tensor([[1, 2], [3, 4]], dtype=torch.int32))
    spread = spread_scales(words, torch.tensor([3, 1]), 5)
    assert spread.tolist() == [[0, 0], [3, 4], [0, 0], [1, 2], [0, 0]]
    assert spread.stride() == (1, 8)


def test_fp32_scales_stay_row_major_between_poison():
    spread = spread_scales(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 2]), 3)
    assert spread[[0, 2]].tolist() == [[1.0], [2.0]]
    assert spread[1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spread_rows_stand_between_zeros_where_padding_is_zeroed(dtype):
    spread = spread_rows(rows(dtype, 3), torch.tensor([4, 1, 2]), 5, zeroes_padding=True)
    whole, zero = as_bytes(rows(dtype, 3)), [0] * (3 * dtype.itemsize)
    assert as_bytes(spread) == [zero, whole[1], whole[2], zero, whole[0]]


def test_fp32_scales_stand_between_zeros_where_padding_is_zeroed():
    spread = spread_scales(torch.tensor([[1.0]]), torch.tensor([1]), 3, zeroes_padding=True)
    assert spread.tolist() == [[0.0], [1.0], [0.0]]

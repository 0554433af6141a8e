"""Rows that nobody may read are filled so that nobody can miss it."""

import pytest
import torch

from moe.poison import poison


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]
)
def test_floats_become_nan(dtype):
    rows = poison(torch.zeros(2, 3).to(dtype))
    assert rows.dtype == dtype
    assert bool(rows.to(torch.float32).isnan().all())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.uint8, 255), (torch.int32, 2**31 - 1), (torch.int64, 2**63 - 1)],
    ids=str,
)
def test_integers_become_their_largest_value(dtype, expected):
    assert poison(torch.zeros(2, dtype=dtype)).tolist() == [expected] * 2


def test_rows_are_filled_in_place():
    rows = torch.zeros(2, 2)
    assert poison(rows) is rows


def test_a_view_is_filled_alone():
    rows = torch.zeros(3)
    poison(rows[1:2])
    assert rows.isnan().tolist() == [False, True, False]

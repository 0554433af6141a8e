import pytest
import torch

from moe.gemm_segments import Segment, segments_of

EQUAL = Segment(expert=0, start=0, end=2, last=4)
"""Of four rows, the last three equal: two are multiplied."""

ALL_DIFFER = Segment(expert=0, start=0, end=4, last=4)


def rows_of(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Four rows, of which the last three are equal."""
    rows = torch.ones(4, columns)
    rows[0] = 2
    return rows.to(dtype)


def found(rows: torch.Tensor, scale: torch.Tensor | None = None) -> list[Segment]:
    return segments_of(rows, scale, torch.zeros(len(rows), dtype=torch.int32), 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 4, 6, 8, 12, 16])
def test_equal_rows_at_an_end_are_multiplied_once(columns, dtype):
    assert found(rows_of(columns, dtype)) == [EQUAL]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("columns", [1, 3, 4, 6, 8, 12, 16])
def test_one_other_cell_makes_another_row(columns, dtype):
    rows = rows_of(columns, torch.float32)
    rows[3, columns - 1] = -1
    assert found(rows.to(dtype)) == [ALL_DIFFER]


def test_a_zero_of_another_sign_makes_another_row():
    rows = torch.zeros(4, 8)
    rows[3, 5] = -0.0
    assert found(rows) == [ALL_DIFFER]


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_rows_may_begin_anywhere_in_memory(start):
    memory = torch.zeros(start + 4 * 8, dtype=torch.bfloat16)
    rows = memory[start:].view(4, 8)
    rows.copy_(rows_of(8, torch.bfloat16))
    assert found(rows) == [EQUAL]


def test_another_scale_makes_another_row_in_whatever_layout_scales_lie():
    scale = torch.ones(2, 4, dtype=torch.int32).t()  # one column after the other
    assert found(rows_of(8, torch.float8_e4m3fn), scale) == [EQUAL]
    scale[3, 1] = 2
    assert found(rows_of(8, torch.float8_e4m3fn), scale) == [ALL_DIFFER]

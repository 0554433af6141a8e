"""Rows keep their bytes in slabs; what they do not cover is poison."""

import pytest
import torch

from moe.quant.ue8m0 import mn_major
from moe.slabs import spread_slab_scales, spread_slabs

PLACES = torch.tensor([4, 0, 1])
"""Slab 1 row 0, slab 0 rows 0 and 1, in two slabs of four rows."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rows_stand_at_their_places_between_poison(dtype):
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).to(dtype)
    slabs = spread_slabs(rows, PLACES, num_slabs=2, height=4)
    assert (slabs.shape, slabs.dtype) == ((2, 4, 2), dtype)
    wide = slabs.to(torch.float32)
    assert wide[[1, 0, 0], [0, 0, 1]].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert bool(wide[[0, 0, 1, 1, 1], [2, 3, 1, 2, 3]].isnan().all())


def test_fp32_scales_are_row_major_between_poison():
    scales = spread_slab_scales(torch.tensor([[1.0], [2.0], [3.0]]), PLACES, 2, 4)
    assert scales.is_contiguous()
    assert scales[:, :, 0].nan_to_num(-1).tolist() == [[2, 3, -1, -1], [1, -1, -1, -1]]


@pytest.mark.parametrize("arrange", [torch.clone, mn_major], ids=["row_major", "mn_major"])
def test_packed_scales_have_the_rows_of_a_slab_fastest_between_poison(arrange):
    words = arrange(torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32))
    scales = spread_slab_scales(words, PLACES, 2, 4)
    rubbish = torch.iinfo(torch.int32).max
    assert (scales.shape, scales.stride()) == ((2, 4, 2), (8, 1, 4))
    assert scales[:, :, 0].tolist() == [[3, 5, rubbish, rubbish], [1] + [rubbish] * 3]
    assert scales[:, :, 1].tolist() == [[4, 6, rubbish, rubbish], [2] + [rubbish] * 3]

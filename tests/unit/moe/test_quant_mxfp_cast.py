"""mxfp4 turned into fp8 blocks: against the golden model, and what is lost, by value."""

import numpy as np
import pytest
import torch

from moe.golden import decode_mxfp4, fp4_as_fp8
from moe.quant.e2m1 import pack_e2m1
from moe.quant.fp8 import dequantize_blocks, e4m3_to_fp32
from moe.quant.mxfp import cast_e2m1_to_e4m3

FULL_SCALE = 127
"""The byte of scale 1."""


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got.to(torch.float64).view(torch.int64), expected.view(torch.int64))


def random_mxfp4(rows: int, columns: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scale bytes of [low, high], drawn."""
    draw = np.random.default_rng(rows + columns)
    packed = draw.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scale = draw.integers(low, high + 1, (rows, columns // 32), dtype=np.uint8)
    return torch.from_numpy(packed), torch.from_numpy(scale)


MATRICES = {
    "within-2^14": random_mxfp4(128, 256, 113, 127),
    "within-2^30": random_mxfp4(128, 256, 97, 127),
    "every-scale": random_mxfp4(128, 256, 0, 254),
    "smallest-scales": random_mxfp4(128, 128, 0, 1),
    "largest-scales": random_mxfp4(128, 128, 240, 254),
    "cut-rows": random_mxfp4(200, 128, 110, 127),
    "cut-columns": random_mxfp4(128, 160, 110, 127),
    "one-group": random_mxfp4(1, 32, 110, 127),
    "cut-both": random_mxfp4(257, 288, 100, 127),
}
EVERY_MATRIX = pytest.mark.parametrize("name", MATRICES)


@EVERY_MATRIX
def test_fp4_as_fp8_has_the_codes_of_the_golden_model(name):
    expected = fp4_as_fp8(*MATRICES[name]).codes.contiguous()
    assert_same_bits(e4m3_to_fp32(cast_e2m1_to_e4m3(*MATRICES[name]).values), expected)


@EVERY_MATRIX
def test_fp4_as_fp8_has_the_scales_of_the_golden_model(name):
    expected = fp4_as_fp8(*MATRICES[name]).scale
    assert_same_bits(cast_e2m1_to_e4m3(*MATRICES[name]).scale_inv, expected)


def test_fp4_as_fp8_loses_nothing_within_2_to_the_14():
    packed, scale = MATRICES["within-2^14"]
    got = dequantize_blocks(cast_e2m1_to_e4m3(packed, scale))
    assert torch.equal(got.double(), decode_mxfp4(packed, scale))


def dropped(magnitude_code: int, drops: list[int]) -> torch.Tensor:
    """[drops] fp32 that fp4 as fp8 makes of a value whose group lies so far under the largest.

    In units of its own group's scale, one row a drop; the last row holds the largest group.
    """
    codes = torch.full((len(drops) + 1, 32), magnitude_code, dtype=torch.uint8)
    scale = torch.tensor([[FULL_SCALE - drop] for drop in [*drops, 0]], dtype=torch.uint8)
    blocks = cast_e2m1_to_e4m3(pack_e2m1(codes), scale)
    return dequantize_blocks(blocks)[:-1, 0] * torch.exp2(torch.tensor(drops))


@pytest.mark.parametrize(
    ("code", "value", "last"),
    [
        (0, 0.0, 126),
        (1, 0.5, 14),
        (2, 1.0, 15),
        (3, 1.5, 14),
        (4, 2.0, 16),
        (5, 3.0, 15),
        (6, 4.0, 17),
        (7, 6.0, 16),
        (9, -0.5, 14),
        (10, -1.0, 15),
        (11, -1.5, 14),
        (12, -2.0, 16),
        (13, -3.0, 15),
        (14, -4.0, 17),
        (15, -6.0, 16),
    ],
)
def test_a_value_survives_down_to_a_drop_of_its_own(code, value, last):
    survives = dropped(code, list(range(127))) == value
    assert survives.tolist() == [drop <= last for drop in range(127)]


@pytest.mark.parametrize(
    ("code", "drop", "becomes"),
    [(1, 15, 0.0), (3, 15, 2.0), (2, 16, 0.0), (5, 16, 4.0), (7, 18, 8.0), (7, 19, 0.0)],
)
def test_what_lies_further_down_is_rounded(code, drop, becomes):
    assert dropped(code, [drop]).tolist() == [becomes]


def test_the_largest_group_fills_e4m3_up_to_384():
    packed = torch.full((1, 16), 0x77, dtype=torch.uint8)
    blocks = cast_e2m1_to_e4m3(packed, torch.tensor([[FULL_SCALE]], dtype=torch.uint8))
    assert (blocks.values.float().unique().item(), blocks.scale_inv.item()) == (384.0, 2.0**-6)


def test_a_block_whose_bytes_are_all_zero_has_a_subnormal_scale():
    packed, scale = torch.full((1, 16), 0x21, dtype=torch.uint8), torch.zeros(1, 1).byte()
    blocks = cast_e2m1_to_e4m3(packed, scale)
    assert blocks.scale_inv.tolist() == [[2.0**-133]]
    assert dequantize_blocks(blocks)[0, :2].tolist() == [2.0**-128, 2.0**-127]


def test_a_byte_of_255_makes_its_whole_block_nan_and_no_other():
    scale = torch.full((1, 8), FULL_SCALE, dtype=torch.uint8)
    scale[0, 2] = 255
    got = dequantize_blocks(cast_e2m1_to_e4m3(torch.full((1, 128), 0x21).byte(), scale))
    assert got.isnan()[0].tolist() == [True] * 128 + [False] * 128


def test_each_block_is_scaled_for_its_own_largest_group():
    scale = torch.full((130, 5), 120, dtype=torch.uint8)
    scale[127, 3], scale[0, 4], scale[128, 0] = 127, 125, 123
    blocks = cast_e2m1_to_e4m3(torch.zeros(130, 80, dtype=torch.uint8), scale)
    assert blocks.scale_inv.tolist() == [[2.0**-6, 2.0**-8], [2.0**-10, 2.0**-13]]


def test_experts_of_a_batch_are_cast_each_on_its_own():
    packed, scale = (t.view(2, 64, -1) for t in MATRICES["within-2^30"])
    together = cast_e2m1_to_e4m3(packed, scale)
    for index in range(2):
        alone = cast_e2m1_to_e4m3(packed[index], scale[index])
        assert torch.equal(together.values[index].view(torch.uint8), alone.values.view(torch.uint8))
        assert torch.equal(together.scale_inv[index], alone.scale_inv)


def test_scales_that_do_not_fit_the_codes_are_refused():
    with pytest.raises(ValueError, match=r"\(2, 32\) need one scale for every 16 bytes"):
        cast_e2m1_to_e4m3(torch.zeros(2, 32).byte(), torch.zeros(2, 4).byte())

"""Codes and scales of the kernel are those of torch, bit by bit."""

import pytest
import torch

from moe.formats import ScaleFormat
from moe.quant import fp8
from moe.quant.ue8m0 import unpack_ue8m0
from moe.triton_kernels.group_quant import quantize_groups

FORMATS = [ScaleFormat.FP32, ScaleFormat.UE8M0]


def rows(num_rows, width, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    magnitudes = torch.exp2(torch.randint(-30, 30, (num_rows, 1), generator=generator).float())
    return (torch.randn(num_rows, width, generator=generator) * magnitudes).to(dtype)


def same_bits(got, expected):
    assert torch.equal(got.values.view(torch.uint8).cpu(), expected.values.view(torch.uint8))
    assert torch.equal(got.scale.cpu().view(torch.int32), expected.scale.view(torch.int32))
    if got.scale.numel():
        assert got.scale.stride() == expected.scale.stride()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "width", "group"), [(17, 640, 128), (5, 96, 32), (0, 128, 128)]
)
def test_codes_and_scales_are_torchs(device, scale_format, dtype, num_rows, width, group):
    given = rows(num_rows, width, dtype)
    expected = fp8.quantize_groups(given, scale_format, group_size=group)
    same_bits(quantize_groups(given.to(device), scale_format, group_size=group), expected)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_numbers_without_a_scale_of_their_own_are_torchs(device, scale_format):
    given = torch.zeros(6, 128)
    given[1, :3] = torch.tensor([torch.inf, -torch.inf, 1.0])
    given[2, :3] = torch.tensor([torch.nan, 2.0, -3.0])
    given[3] = torch.nan
    given[4, 0] = -0.0
    given[5, :2] = torch.tensor([torch.finfo(torch.float32).tiny / 4, 1e-11])
    same_bits(
        quantize_groups(given.to(device), scale_format), fp8.quantize_groups(given, scale_format)
    )


def test_values_around_every_boundary_between_codes_round_as_torchs_cast_does(device):
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (codes[1:] + codes[:-1]) / 2
    around = torch.cat(
        [codes, halfway, halfway.nextafter(halfway + 1), halfway.nextafter(codes[:-1])]
    )
    signed = torch.cat([around, -around])
    groups = torch.nn.functional.pad(signed, (0, -len(signed) % 127)).view(-1, 127)
    scaled_by_one = torch.nn.functional.pad(groups, (1, 0), value=448.0)
    codes = quantize_groups(scaled_by_one.to(device), ScaleFormat.UE8M0).values
    got = codes.view(torch.uint8)[:, 1:].flatten()[: len(signed)]
    expected = signed.to(torch.float8_e4m3fn).view(torch.uint8)
    assert got.tolist() == expected.tolist()


def test_a_word_holds_four_exponents_lowest_byte_first(device):
    given = torch.zeros(1, 5 * 32)
    given[0, ::32] = torch.tensor([448.0, 449.0, 896.0, 224.0, 1.75])
    scale = quantize_groups(given.to(device), ScaleFormat.UE8M0, group_size=32).scale
    assert scale.shape == (1, 2)
    assert unpack_ue8m0(scale.cpu(), 8).tolist() == [[127, 128, 128, 126, 119, 0, 0, 0]]


def test_rows_that_are_columns_of_wider_ones_are_read_in_their_places(device):
    given = rows(3, 640)
    narrow = given.to(device)[:, 128:384]
    same_bits(
        quantize_groups(narrow, ScaleFormat.FP32),
        fp8.quantize_groups(given[:, 128:384].contiguous(), ScaleFormat.FP32),
    )


def test_a_larger_floor_scales_small_groups_less(device):
    given = torch.full((1, 128), 1e-6)
    scale = quantize_groups(given.to(device), ScaleFormat.FP32, amax_floor=1e-4).scale
    assert scale.item() == pytest.approx(1e-4 / 448, rel=1e-6)


def test_columns_that_do_not_split_are_refused(device):
    with pytest.raises(ValueError, match="96 columns do not split into groups of 128"):
        quantize_groups(torch.zeros(2, 96, device=device), ScaleFormat.FP32)

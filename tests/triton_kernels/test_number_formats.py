"""What kernels spell out bit by bit is what torch casts, and their exp is as close as declared."""

import pytest
import torch
import triton
import triton.language as tl

from moe.arithmetic import ArithmeticModel
from moe.quant.ue8m0 import exponent_rounded_up, reciprocal_from_exponent
from moe.triton_kernels.number_formats import (
    bf16_to_fp32,
    exp_fp32,
    fp32_to_bf16,
    ue8m0_reciprocal,
    ue8m0_rounded_up,
)

MOST_A_PROGRAM = 2048


@triton.jit
def _exp(x, out, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, exp_fp32(tl.load(x + i)))


@triton.jit
def _to_bf16(x, out, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, fp32_to_bf16(tl.load(x + i)))


@triton.jit
def _from_bf16(x, out, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, bf16_to_fp32(tl.load(x + i)))


@triton.jit
def _round_up(x, out, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, ue8m0_rounded_up(tl.load(x + i)))


@triton.jit
def _reciprocal(x, out, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, ue8m0_reciprocal(tl.load(x + i)))


@pytest.fixture
def through(device):
    def run(kernel, x, dtype):
        out = torch.empty(x.shape, dtype=dtype, device=device)
        size = min(x.shape[0], MOST_A_PROGRAM)
        kernel[(x.shape[0] // size,)](x.to(device), out, SIZE=size, enable_fp_fusion=False)
        return out.cpu()

    return run


def drawn(size):
    """fp32 of every exponent."""
    generator = torch.Generator().manual_seed(12)
    bits = torch.randint(-(2**31), 2**31, (size,), generator=generator).to(torch.int32)
    return bits.view(torch.float32).nan_to_num(nan=1.0)


def test_exp_is_as_close_as_arithmetic_declares(through):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(1 << 15, generator=generator) * 175 - 87
    x[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
    exact = x.double().exp()
    ulp = torch.exp2(exact.log2().floor() - 23)
    error = (through(_exp, x, torch.float32).double() - exact).abs() / ulp
    assert error.max().item() < ArithmeticModel().transcendental_ulp


def test_exp_at_its_ends_is_zero_infinity_or_nan(through):
    x = torch.tensor([-torch.inf, -104.0, 89.0, torch.inf, torch.nan, 0.0, 88.5, -90.0])
    got = through(_exp, x, torch.float32)
    assert got[[0, 1]].max().item() <= 2.0**-149
    assert got[[2, 3]].tolist() == [torch.inf] * 2
    assert got[4].isnan()
    assert got[5].item() == 1.0
    assert got[6].item() == pytest.approx(2.7231e38, rel=1e-4)
    assert got[7].item() == pytest.approx(8.194e-40, rel=1e-3)


def test_fp32_of_every_exponent_is_rounded_to_bf16_as_torch_does(through):
    x = drawn(1 << 14)
    got = through(_to_bf16, x, torch.int16)
    assert torch.equal(got, x.to(torch.bfloat16).view(torch.int16))


def test_ties_between_bf16_go_to_the_even_one(through):
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, torch.inf])
    got = through(_to_bf16, x, torch.int16).view(torch.bfloat16)
    assert got.tolist() == [1.0, 1 + 2.0**-6, -1.0, torch.inf]


def test_every_bf16_is_read_exactly(through):
    bits = torch.arange(1 << 16).to(torch.int16)
    got = through(_from_bf16, bits, torch.float32).view(torch.int32)
    assert torch.equal(got, bits.view(torch.bfloat16).float().view(torch.int32))


def test_scales_are_rounded_up_to_powers_of_two_as_torchs(through):
    x = drawn(1 << 12).abs()
    x[:6] = torch.tensor([0.0, 2.0**-149, 1.0, 1 + 2.0**-23, torch.inf, torch.nan])
    got = through(_round_up, x, torch.int32)
    assert got.tolist() == exponent_rounded_up(x).tolist()
    assert got[:6].tolist() == [0, 1, 127, 128, 255, 255]


def test_every_exponent_has_torchs_reciprocal(through):
    exponents = torch.arange(256, dtype=torch.int32)
    got = through(_reciprocal, exponents, torch.float32)
    assert torch.equal(got, reciprocal_from_exponent(exponents.to(torch.uint8)))

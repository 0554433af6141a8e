"""Number formats in float64: what a code means, and which code point a value rounds to."""

import math
from typing import Final

import torch
from torch import Tensor

E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
_FLOAT64_EXPONENT_BITS: Final = 0x7FF0000000000000


def _e4m3_value(code: int) -> float:
    """Value of one e4m3fn code: sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


_E4M3_VALUES: Final = torch.tensor([_e4m3_value(code) for code in range(256)], dtype=torch.float64)


def decode_e4m3(codes: Tensor) -> Tensor:
    """Values of e4m3fn codes.

    Args:
        codes: [...] uint8; view a float8_e4m3fn tensor as uint8 first.

    Returns:
        [...] float64; the codes 0x7F and 0xFF are NaN.

    Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, format E4M3.
    """
    values = _E4M3_VALUES.to(codes.device).index_select(0, codes.int().flatten())
    return values.view(codes.shape)


def round_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest e4m3fn value, ties to the even code, saturating.

    The format itself has no infinity and would make NaN of an overflow; the quantisers clamp to
    448 with a minimum that returns the operand that is not NaN.

    Args:
        x: [...] float64.

    Returns:
        [...] float64 on the e4m3fn grid; beyond +-448 and +-inf give +-448, NaN gives +448; the
        sign of zero is kept.

    Source: SGLang 0.5.21, kernels/jit/csrc/gemm/per_token_group_quant.cuh.
    """
    rounded = _round_to_steps(x, mantissa_bits=3, min_step=2.0**-9, max_step=2.0**5)
    return rounded.clamp_(-E4M3_MAX, E4M3_MAX).nan_to_num_(nan=E4M3_MAX)


def _e2m1_value(code: int) -> float:
    """Value of one e2m1 code: sign, 2 exponent bits (bias 1), 1 mantissa bit; all finite."""
    sign = -1.0 if code & 0x8 else 1.0
    exponent, mantissa = (code >> 1) & 0x3, code & 0x1
    if exponent == 0:
        return sign * mantissa * 0.5
    return sign * (2 + mantissa) * 2.0 ** (exponent - 2)


_E2M1_VALUES: Final = torch.tensor([_e2m1_value(code) for code in range(16)], dtype=torch.float64)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Values of e2m1 codes.

    Args:
        codes: [...] integers in [0, 15].

    Returns:
        [...] float64

    Source: OCP Microscaling Formats (MX) Specification 1.0, element format FP4.
    """
    values = _E2M1_VALUES.to(codes.device).index_select(0, codes.int().flatten())
    return values.view(codes.shape)


def round_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest e2m1 value, ties to the even code, saturating.

    Args:
        x: [...] float64.

    Returns:
        [...] float64 on the e2m1 grid; beyond +-6 and +-inf give +-6, NaN gives +6; the sign of
        zero is kept.

    Source: PTX ISA, cvt.rn.satfinite.e2m1x2.f32.
    """
    rounded = _round_to_steps(x, mantissa_bits=1, min_step=0.5, max_step=2.0)
    return rounded.clamp_(-E2M1_MAX, E2M1_MAX).nan_to_num_(nan=E2M1_MAX)


def round_bf16(x: Tensor) -> Tensor:
    """Round to the nearest bf16 value, ties to even, in one step from float64.

    Args:
        x: [...] float64.

    Returns:
        [...] float64 on the bf16 grid, subnormals included; from 2^128 - 2^119 on it is infinite;
        NaN stays NaN; the sign of zero is kept.
    """
    rounded = _round_to_steps(x, mantissa_bits=7, min_step=2.0**-133, max_step=2.0**120)
    # From 2^128 on the first factor overflows float64; below it both are exact.
    return rounded.mul_(2.0**896).mul_(2.0**-896)


def _round_to_steps(x: Tensor, mantissa_bits: int, min_step: float, max_step: float) -> Tensor:
    """Nearest multiple of the format's step at each value, ties to an even multiple.

    The step of [2^p, 2^(p+1)) is 2^(p - mantissa_bits), bounded by that of the subnormals and
    that of the format's last binade.
    """
    power = (x.view(torch.int64) & _FLOAT64_EXPONENT_BITS).view(torch.float64)
    step = power.mul_(2.0**-mantissa_bits).clamp_(min_step, max_step)
    return (x / step).round_().mul_(step)


def power_of_two(exponent: Tensor) -> Tensor:
    """Exact 2^exponent: [...] integers in [-1022, 1023] to float64."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def decode_ue8m0(bytes_: Tensor) -> Tensor:
    """Values of UE8M0 bytes, an exponent alone.

    Args:
        bytes_: [...] integers in [0, 255].

    Returns:
        [...] float64: 2^(byte - 127); 255 is NaN.

    Source: OCP Microscaling Formats (MX) Specification 1.0, scale format E8M0.
    """
    return power_of_two(bytes_.long() - 127).masked_fill(bytes_ == 255, math.nan)


def round_ue8m0_up(x: Tensor) -> Tensor:
    """Smallest value of UE8M0 that is not under x.

    Args:
        x: [...] float64, not negative.

    Returns:
        [...] float64, a power of two in [2^-127, 2^127]; NaN above that range and for NaN.
    """
    mantissa, exponent = torch.frexp(x)
    power = (exponent - (mantissa == 0.5).int()).masked_fill(x == 0, -127).clamp(min=-127)
    return power_of_two(power).masked_fill(~(x <= 2.0**127), math.nan)


def unpack_ue8m0(packed: Tensor, num_groups: int) -> Tensor:
    """Scales of the layout that keeps four UE8M0 bytes in an int32.

    Args:
        packed: [..., MN, ceil(G/4)] int32, any strides; byte j of word c, least significant
            first, is group 4c + j.
        num_groups: G; bytes beyond it are padding.

    Returns:
        [..., MN, G] float64.

    Raises:
        ValueError: the number of words is not ceil(num_groups / 4).

    Source: DeepGEMM deep_gemm/utils/math.py::pack_ue8m0_to_int.
    """
    num_words = -(-num_groups // 4)
    if packed.shape[-1] != num_words:
        raise ValueError(f"{num_groups} groups take {num_words} words, got {packed.shape[-1]}")
    shifts = torch.arange(0, 32, 8, device=packed.device)
    bytes_ = (packed.unsqueeze(-1).long() >> shifts) & 0xFF
    return decode_ue8m0(bytes_.flatten(-2)[..., :num_groups])

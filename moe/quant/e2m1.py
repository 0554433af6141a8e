"""The four-bit format e2m1: rounding to codes, decoding them, and two of them in a byte."""

import torch
from torch import Tensor

E2M1_MAX = 6.0
CODES_PER_BYTE = 2
_SIGN = 8

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUE_OF_CODE = torch.cat([_MAGNITUDES, -_MAGNITUDES])
_PAIR_OF_BYTE = torch.stack(
    [_VALUE_OF_CODE.repeat(16), _VALUE_OF_CODE.repeat_interleave(16)], dim=-1
)


def _last_value_of_code() -> list[float]:
    """The largest fp32 number that rounds to each code from 0 to 6; a tie goes to the even code."""
    ties = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
    below = torch.nextafter(ties, torch.zeros(()))
    is_even = torch.arange(7) % 2 == 0
    last: list[float] = torch.where(is_even, ties, below).tolist()
    return last


_LAST_VALUE_OF_CODE = _last_value_of_code()


def round_to_e2m1(values: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to the even code, saturating at +-6.

    Args:
        values: [...] fp32 or bf16. NaN of either sign becomes +6, as the instruction makes it.

    Returns:
        [...] uint8 in [0, 15]: bit 3 the sign, kept for zero and for what rounds to zero.

    Source: PTX ISA, cvt.rn.satfinite.e2m1x2.f32; OCP Microscaling Formats (MX) 1.0, FP4.
    """
    numbers = values.to(torch.float32).nan_to_num(nan=E2M1_MAX)
    magnitudes = numbers.abs()
    codes = numbers.signbit().to(torch.uint8) * _SIGN
    for last in _LAST_VALUE_OF_CODE:  # seven comparisons are four times the speed of bucketize
        codes += magnitudes > last
    return codes


def e2m1_to_fp32(codes: Tensor) -> Tensor:
    """Values of e2m1 codes.

    Args:
        codes: [...] uint8 in [0, 15].

    Returns:
        [...] fp32
    """
    index = codes.to(torch.int32).flatten()
    return _VALUE_OF_CODE.to(codes.device).index_select(0, index).view(codes.shape)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes a byte, the earlier column in the low half.

    Args:
        codes: [..., K] uint8 in [0, 15].

    Returns:
        [..., K/2] uint8

    Raises:
        ValueError: K is odd.
    """
    if codes.shape[-1] % CODES_PER_BYTE:
        raise ValueError(f"{codes.shape[-1]} columns do not pack two to a byte")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Codes of ``pack_e2m1``: [..., K/2] uint8 to [..., K] uint8 in [0, 15]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def unpacked_e2m1_to_fp32(packed: Tensor) -> Tensor:
    """Values of packed codes, one table look-up a byte.

    Args:
        packed: [..., K/2] uint8, the earlier column in the low half.

    Returns:
        [..., K] fp32
    """
    *batch, num_bytes = packed.shape
    pairs = _PAIR_OF_BYTE.to(packed.device).index_select(0, packed.to(torch.int32).flatten())
    return pairs.view(*batch, num_bytes * CODES_PER_BYTE)

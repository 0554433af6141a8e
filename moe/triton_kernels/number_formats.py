"""Casts inside kernels, bit by bit: the interpreter has no right ones for bf16 and e4m3.

bf16 travels as int16 and e4m3 as uint8, so that a GPU and the interpreter give the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def bf16_to_fp32(bits):
    """int16 patterns of bf16 as fp32, exact."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fp32_to_bf16(values):
    """fp32 as int16 patterns of bf16: nearest, ties to even; every NaN is 0x7fc0."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def fp32_to_e4m3(values):
    """fp32 as uint8 codes of e4m3fn: nearest, ties to even, saturating; NaN is 448.

    A normal number gets its exponent rebased from 127 to 7 and loses 20 bits. A smaller one is
    rounded by the adder: next to 2^14 an fp32 is a multiple of 2^-9, the least e4m3 number.
    """
    number = tl.where(values == values, values, 448.0)
    number = tl.where(number > 448.0, 448.0, tl.where(number < -448.0, -448.0, number))
    bits = number.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    rebased = magnitude - (120 << 23)
    normal = (rebased + 0x7FFFF + ((rebased >> 20) & 1)) >> 20
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    return (sign | tl.where(magnitude < (121 << 23), subnormal, normal)).to(tl.uint8)


@triton.jit
def ue8m0_rounded_up(scale):
    """int32 exponent byte of the least power of two that is not under ``scale``, 255 at most."""
    bits = scale.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.where(exponent > 255, 255, exponent)


@triton.jit
def ue8m0_reciprocal(exponent):
    """fp32 ``2 ** (127 - e)``, subnormal for 254 and 255."""
    normal = (254 - exponent) << 23
    bits = tl.where(exponent < 254, normal, tl.where(exponent == 254, 0x400000, 0x200000))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def exp_fp32(x):
    """e^x within an ulp or two in fp32, by the same additions and products everywhere.

    ``x`` is n ln 2 + r with r under ln 2 / 2; e^r is its Taylor sum, 2^n is built from bits, in two
    halves because neither an infinite nor a subnormal power of two can be.

    Source: Cody and Waite, Software Manual for the Elementary Functions, chapter 6.
    """
    is_too_large = x > 88.72284  # ln of the largest fp32
    x = tl.where(is_too_large, 0.0, tl.where(x < -104.0, -104.0, x))
    power = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - power * 0.693359375) - power * -2.12194440e-4
    total = 1.0 + r * (1.0 / 7)
    total = 1.0 + r * (1.0 / 6) * total
    total = 1.0 + r * (1.0 / 5) * total
    total = 1.0 + r * (1.0 / 4) * total
    total = 1.0 + r * (1.0 / 3) * total
    total = 1.0 + r * 0.5 * total
    total = 1.0 + r * total
    whole = tl.where(power == power, power, 0.0).to(tl.int32)
    half = whole >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_too_large, float("inf"), total * low * high)

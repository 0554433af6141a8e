"""Bands from declared rounding points; the only constants are the formats' own unit roundoffs."""

from torch import Tensor

from moe.arithmetic import BF16_ROUNDOFF, FP32_ROUNDOFF, ArithmeticModel, compounded

BF16_SMALLEST = 2.0**-133
"""Smallest bf16 subnormal: below it a rounding has no relative bound."""

FP32_EXP_OVERFLOW = 2.0**-127
"""``x / (1 + exp(-x))`` flushes to zero once exp overflows fp32; |x| times this bounds the loss."""


def stored_bf16(want: Tensor, noise: Tensor) -> Tensor:
    """Band of a value that carries ``noise`` and is then rounded to bf16."""
    half_a_place = want.abs().mul_(BF16_ROUNDOFF).add_(BF16_SMALLEST)
    return half_a_place.add_(noise, alpha=1 + BF16_ROUNDOFF)


def gemm_noise(magnitude: Tensor, terms: int, arithmetic: ArithmeticModel) -> Tensor:
    """Error of a sum of ``terms`` products whose magnitudes add up to ``magnitude``."""
    return arithmetic.sum_error(terms) * magnitude


def fp32_noise(magnitude: Tensor, roundings: int) -> Tensor:
    """Error of ``roundings`` fp32 roundings in a row on sums of ``magnitude``."""
    return compounded(max(roundings, 0), FP32_ROUNDOFF) * magnitude


def silu_noise(gate_up: Tensor, want: Tensor, arithmetic: ArithmeticModel) -> Tensor:
    """Error of ``gate / (1 + exp(-gate)) * up`` in fp32.

    An exp and a division of declared ulps, one addition, one multiplication, and the flush to
    zero where exp overflows.

    Args:
        gate_up: [R, 2I] float64, the stage's input.
        want: [R, I] float64, the golden's result.
        arithmetic: declares the ulps.
    """
    gate, up = gate_up.chunk(2, dim=1)
    relative = (2 * 2 * arithmetic.transcendental_ulp + 2) * FP32_ROUNDOFF
    return relative * want.abs() + (gate * up).abs().nan_to_num() * FP32_EXP_OVERFLOW


def router_noise(arithmetic: ArithmeticModel, top_k: int) -> float:
    """Relative error of a sqrtsoftplus score after normalisation by a sum of ``top_k`` scores.

    exp, log, a division and a square root of declared ulps; an addition, a multiplication and a
    subtraction; the sum of the scores and its division.
    """
    transcendental = 2 * 5 * arithmetic.transcendental_ulp
    return (transcendental + 3 + top_k) * FP32_ROUNDOFF


def reciprocal_noise(arithmetic: ArithmeticModel) -> float:
    """Relative error in front of a quantiser's rounding where its scale has a mantissa.

    A reciprocal of declared ulps and one product.
    """
    return (2 * arithmetic.reciprocal_ulp + 1) * FP32_ROUNDOFF

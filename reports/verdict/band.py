"""Bands from declared rounding points; the only constants are the formats' own unit roundoffs."""

import torch
from torch import Tensor

from moe.arithmetic import BF16_ROUNDOFF, FP32_ROUNDOFF, ArithmeticModel, compounded

BF16_LARGEST = 2.0**128 * (1 - 2.0**-8)
BF16_SMALLEST = 2.0**-133
"""Smallest bf16 subnormal: below it a rounding has no relative bound."""

SMALLEST_SCORE = 2.0**-63
"""Square root of fp32's smallest normal number: below it exp may flush, and a score be zero."""

FP32_EXP_OVERFLOW = 2.0**-127
"""``x / (1 + exp(-x))`` flushes to zero once exp overflows fp32; |x| times this bounds the loss."""


def stored_bf16(want: Tensor, noise: Tensor) -> Tensor:
    """Band of a value that carries ``noise`` and is then rounded to bf16."""
    size = want.abs()
    band = (size * BF16_ROUNDOFF).add_(BF16_SMALLEST).add_(noise, alpha=1 + BF16_ROUNDOFF)
    if bool((size > BF16_LARGEST / 2).any()):
        band.masked_fill_(size + noise >= BF16_LARGEST, torch.inf)  # may store as infinity
    return band


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


def score_noise(arithmetic: ArithmeticModel) -> float:
    """Relative error of ``sqrt(softplus(x))`` in fp32.

    exp, log and a division of declared ulps, an addition, a subtraction and a multiplication; the
    square root halves their sum and adds its own.
    """
    before_the_root = 2 * 3 * arithmetic.transcendental_ulp + 3
    return (before_the_root / 2 + 2 * arithmetic.transcendental_ulp) * FP32_ROUNDOFF


def weight_noise(arithmetic: ArithmeticModel, top_k: int, renormalize: bool) -> float:
    """Relative error of a top-k weight: of a score, or of a score over the sum of ``top_k``."""
    if not renormalize:
        return score_noise(arithmetic)
    division = 2 * arithmetic.transcendental_ulp
    return 2 * score_noise(arithmetic) + (top_k - 1 + division) * FP32_ROUNDOFF


def reciprocal_noise(arithmetic: ArithmeticModel) -> float:
    """Relative error in front of a quantiser's rounding where its scale has a mantissa.

    A reciprocal of declared ulps and one product.
    """
    return (2 * arithmetic.reciprocal_ulp + 1) * FP32_ROUNDOFF

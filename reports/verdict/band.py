"""Bands from declared rounding points; the only constants are the formats' own unit roundoffs."""

import torch
from torch import Tensor

from moe.arithmetic import BF16_ROUNDOFF, FP32_ROUNDOFF, ArithmeticModel, compounded
from moe.formats import ActivationKind, GatedActivation, ScoringFunc
from moe.golden import E4M3_MAX, GoldenRouting, clamped, round_bf16

BF16_LARGEST = 2.0**128 * (1 - 2.0**-8)
BF16_SMALLEST = 2.0**-133
"""Smallest bf16 subnormal: below it a rounding has no relative bound."""

FP32_LARGEST = 2.0**128 * (1 - 2.0**-24)
FP32_SMALLEST = 2.0**-149
"""Smallest fp32 subnormal."""

SMALLEST_SCORE = 2.0**-63
"""Square root of fp32's smallest normal number: below it exp may flush, and a score be zero."""

FP32_EXP_OVERFLOW = 2.0**-127
"""``x / (1 + exp(-x))`` flushes to zero once exp overflows fp32; |x| times this bounds the loss."""


def stored_bf16(want: Tensor, noise: Tensor) -> Tensor:
    """Band of a value that carries ``noise`` and is then rounded to bf16."""
    size = want.abs()
    overflows = may_reach(size, BF16_LARGEST / 2)
    band = size.mul_(BF16_ROUNDOFF).add_(BF16_SMALLEST).add_(noise, alpha=1 + BF16_ROUNDOFF)
    if overflows:
        band.masked_fill_(want.abs() + noise >= BF16_LARGEST, torch.inf)  # may store as infinity
    return band


def may_reach(size: Tensor, limit: float) -> bool:
    """Whether any of some magnitudes is at least ``limit``, or no number."""
    return bool(size.numel()) and not bool(size.amax() < limit)


def stored_fp32(want: Tensor, noise: Tensor) -> Tensor:
    """Band of a value that carries ``noise`` and is kept in fp32."""
    return (noise + FP32_SMALLEST).masked_fill_(want.abs() + noise >= FP32_LARGEST, torch.inf)


def once_stored(value: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Middle and half width of what a store as bf16 leaves of a value that carries ``noise``.

    Of most values that is one number: a path that leaves the store out is seen by it, where a band
    widened by the store's rounding would hold both.
    """
    low, high = round_bf16(value - noise), round_bf16(value + noise)
    same = low == high
    return torch.where(same, low, (low + high) / 2), torch.where(same, 0.0, (high - low) / 2)


def gemm_noise(magnitude: Tensor, terms: int, arithmetic: ArithmeticModel) -> Tensor:
    """Error of a sum of ``terms`` products whose magnitudes add up to ``magnitude``.

    Infinite where a partial sum may overflow fp32. A product of two scales that are applied to sums
    of codes may be subnormal, which costs a multiple of the smallest number.
    """
    noise = arithmetic.sum_error(terms) * magnitude
    if arithmetic.scaled_block is not None:
        noise += terms * E4M3_MAX**2 * FP32_SMALLEST
    if may_reach(magnitude, FP32_LARGEST):
        noise.masked_fill_(magnitude >= FP32_LARGEST, torch.inf)
    return noise


def fp32_noise(magnitude: Tensor, roundings: int) -> Tensor:
    """Error of ``roundings`` fp32 roundings in a row on sums of ``magnitude``."""
    return compounded(max(roundings, 0), FP32_ROUNDOFF) * magnitude


def activation_noise(
    gate_up: Tensor, want: Tensor, rule: GatedActivation, arithmetic: ArithmeticModel
) -> Tensor:
    """Error of a gated activation in fp32.

    silu: an exp and a division of declared ulps, one addition, one multiplication, and the flush to
    zero where exp overflows. oai_swiglu: the same, and the argument of exp is a rounded product.
    situ: two tanh of declared ulps besides, which a backend may declare as off by ulps of 1.

    Args:
        gate_up: [R, 2I] float64, the stage's input.
        want: [R, I] float64, the golden's result.
        rule: the formula.
        arithmetic: declares the ulps.
    """
    gate, up = clamped(gate_up, rule.limit)
    roundings = torch.full_like(want, 2 * 2 * arithmetic.transcendental_ulp + 2)
    lost = (gate * up).abs().nan_to_num() * FP32_EXP_OVERFLOW
    match rule.kind:
        case ActivationKind.SILU:
            pass
        case ActivationKind.OAI_SWIGLU:
            roundings += 2 + (gate * (rule.alpha or 1.0)).abs()
            lost = lost + gate.abs().nan_to_num() * FP32_EXP_OVERFLOW
        case ActivationKind.SITU:
            roundings += 2 * (_TANH_ROUNDINGS + 2 * arithmetic.transcendental_ulp)
            if arithmetic.tanh_by_sigmoid:
                lost = lost + _tanh_noise(gate, up, rule, arithmetic)
    return roundings * FP32_ROUNDOFF * want.abs() + lost


_TANH_ROUNDINGS = 3
"""Of its argument, which is a quotient, and of the products around it."""


def _tanh_noise(
    gate: Tensor, up: Tensor, rule: GatedActivation, arithmetic: ArithmeticModel
) -> Tensor:
    """What ulps of 1 in either tanh make of the product."""
    alpha, bound = rule.alpha or 1.0, rule.linear_limit or 1.0
    ulps = (2 * 2 * arithmetic.transcendental_ulp + 2) * FP32_ROUNDOFF
    sigmoid = torch.sigmoid(gate)
    bent_gate, bent_up = torch.tanh(gate / alpha).abs(), torch.tanh(up / bound).abs()
    scale = alpha * bound * sigmoid
    return (ulps * scale * (bent_gate + bent_up + ulps)).nan_to_num()


def score_noise(routing: GoldenRouting, logits: Tensor, arithmetic: ArithmeticModel) -> Tensor:
    """[T, E] relative error of a router score in fp32.

    sqrtsoftplus: exp, log and a division of declared ulps, an addition, a subtraction and a
    multiplication; the square root halves their sum and adds its own. sigmoid: exp, an addition,
    a division. softmax: the shift by the largest logit is rounded, which exp turns into a relative
    error of |shift| roundoffs; exp, the sum over all experts, a division.

    Args:
        routing: the rule.
        logits: [T, E] float64, traced.
        arithmetic: declares the ulps.
    """
    transcendental = 2 * arithmetic.transcendental_ulp
    match routing.scoring_func:
        case ScoringFunc.SQRTSOFTPLUS:
            roundings = torch.full_like(logits, (3 * transcendental + 3) / 2 + transcendental)
        case ScoringFunc.SIGMOID:
            roundings = torch.full_like(logits, 2 * transcendental + 1)
        case ScoringFunc.SOFTMAX:
            shift = (logits.amax(dim=1, keepdim=True) - logits).nan_to_num()
            largest = shift.amax(dim=1, keepdim=True)
            roundings = shift + largest + 3 * transcendental + logits.shape[1]
    return roundings * FP32_ROUNDOFF


def weight_noise(
    routing: GoldenRouting, noise: Tensor, topk_ids: Tensor, arithmetic: ArithmeticModel
) -> Tensor:
    """[T, K] relative error of a top-k weight: of a score, or of a score over the chosen ones' sum.

    Args:
        routing: the rule.
        noise: [T, E] of ``score_noise``.
        topk_ids: [T, K] int64 chosen experts, -1 = none.
        arithmetic: declares the ulps.
    """
    chosen = noise.gather(1, topk_ids.clamp(min=0))
    if not (routing.renormalize or routing.hashed):
        return chosen
    division = 2 * arithmetic.transcendental_ulp
    sums = (routing.top_k + division) * FP32_ROUNDOFF  # additions, and one of an epsilon
    return chosen + chosen.amax(dim=1, keepdim=True) + sums


def reciprocal_noise(arithmetic: ArithmeticModel) -> float:
    """Relative error in front of a quantiser's rounding where its scale has a mantissa.

    A reciprocal of declared ulps and one product.
    """
    return (2 * arithmetic.reciprocal_ulp + 1) * FP32_ROUNDOFF

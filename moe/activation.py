"""Gated activations between the two GEMMs, and how often each layout stores what they compute."""

from enum import StrEnum

import torch
from torch import Tensor

from moe.formats import ActivationKind, GatedActivation, GemmLayout, ScaleFormat
from moe.sigmoid import sigmoid


class ActivationStores(StrEnum):
    """bf16 stores between GEMM1 and the quantiser in front of GEMM2."""

    NONE = "none"
    """The kernel quantises what it computed in fp32."""

    ONCE = "once"
    """The product."""

    TWICE = "twice"
    """silu(gate), then its product with up."""


def stores_of(
    rule: GatedActivation, layout: GemmLayout, scale_format: ScaleFormat
) -> ActivationStores:
    """How the kernel of a layout rounds in front of its quantiser.

    Args:
        rule: the activation.
        layout: of the grouped rows.
        scale_format: of the quantiser; NONE: there is none, as in bf16.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_run_contiguous_gemm, _run_masked_gemm.
    """
    if scale_format is ScaleFormat.NONE:
        return ActivationStores.ONCE
    if rule.keeps_fp32:
        return ActivationStores.NONE
    in_slabs = layout is GemmLayout.MASKED
    match rule.kind:
        case ActivationKind.SILU if in_slabs and rule.limit is None:
            return ActivationStores.TWICE
        case ActivationKind.SILU | ActivationKind.OAI_SWIGLU:
            return ActivationStores.NONE if in_slabs else ActivationStores.ONCE
        case ActivationKind.SITU:
            from_fp32 = in_slabs or scale_format is ScaleFormat.UE8M0
            return ActivationStores.NONE if from_fp32 else ActivationStores.ONCE


def activate(gate_up: Tensor, rule: GatedActivation, stores: ActivationStores) -> Tensor:
    """The gated product, rounded as asked.

    Args:
        gate_up: [M, 2I] bf16, gate columns first.
        rule: the activation.
        stores: TWICE is silu's alone, without a limit.

    Returns:
        [M, I] bf16, or fp32 where nothing is stored.
    """
    if stores is ActivationStores.TWICE:
        gate, up = gate_up.chunk(2, dim=-1)
        return _silu(gate).to(torch.bfloat16) * up
    product = gated_product(gate_up, rule)
    return product if stores is ActivationStores.NONE else product.to(torch.bfloat16)


def gated_product(gate_up: Tensor, rule: GatedActivation) -> Tensor:
    """[M, I] fp32 of [M, 2I] bf16, gate columns first; formulas in ``GatedActivation``.

    Clamps compare bf16 values, but for the gate of oai_swiglu, which is compared in fp32; a NaN
    meets the hardware's min and max, which return the other operand. ``up + 1`` of oai_swiglu is
    stored as bf16.

    Source: SGLang 0.5.21, silu_and_mul_masked_post_quant.cuh, silu_and_mul_clamp; ep_moe/kernels.py
    (oai_swiglu, situ).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if rule.limit is not None:
        gate, up = _clamped(gate, up, rule)
    match rule.kind:
        case ActivationKind.SILU:
            return _silu(gate).mul_(up.to(torch.float32))
        case ActivationKind.OAI_SWIGLU:
            assert rule.alpha is not None
            wide = gate.to(torch.float32)
            return (wide * sigmoid(rule.alpha * wide)).mul_((up + 1).to(torch.float32))
        case ActivationKind.SITU:
            assert rule.alpha is not None
            assert rule.linear_limit is not None
            wide, linear = gate.to(torch.float32), up.to(torch.float32)
            bent = _saturated(wide, rule.alpha).mul_(sigmoid(wide))
            return bent.mul_(_saturated(linear, rule.linear_limit))


def _clamped(gate: Tensor, up: Tensor, rule: GatedActivation) -> tuple[Tensor, Tensor]:
    """Gate from above, up from both sides; the gate of oai_swiglu is compared in fp32."""
    stored = float(torch.tensor(rule.limit, dtype=up.dtype, device="cpu"))
    of_gate = stored
    if rule.kind is ActivationKind.OAI_SWIGLU:
        gate = gate.to(torch.float32)
        of_gate = float(torch.tensor(rule.limit, dtype=torch.float32, device="cpu"))
    gate = gate.nan_to_num(nan=of_gate, neginf=-torch.inf).clamp_(max=of_gate)
    return gate, up.nan_to_num(nan=-stored).clamp_(-stored, stored)


def _silu(gate: Tensor) -> Tensor:
    """``gate / (1 + exp(-gate))`` in fp32."""
    wide = gate.to(torch.float32)
    return wide / wide.neg().exp_().add_(1)


def _saturated(x: Tensor, bound: float) -> Tensor:
    """``bound * tanh(x / bound)``."""
    return (x / bound).tanh_().mul_(bound)

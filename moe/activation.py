"""Gated activations between the two GEMMs."""

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor, swiglu_limit: float | None) -> Tensor:
    """``silu(gate) * up``, clamped where there is a limit, rounded to bf16 once.

    Args:
        gate_up: [M, 2I] bf16, gate columns first.
        swiglu_limit: clamp, or None.

    Returns:
        [M, I] bf16

    Source: SGLang 0.5.21, silu_and_mul_clamp and _legacy_silu_and_mul.
    """
    return unrounded_silu_and_mul(gate_up, swiglu_limit).to(torch.bfloat16)


def unrounded_silu_and_mul(gate_up: Tensor, swiglu_limit: float | None) -> Tensor:
    """``silu(gate) * up`` in fp32.

    With a limit the gate is clamped from above and the up half from both sides, in bf16; a NaN
    meets the hardware's min and max, which return the other operand.

    Args:
        gate_up: [M, 2I] bf16, gate columns first.
        swiglu_limit: clamp, or None.

    Returns:
        [M, I] fp32

    Source: SGLang 0.5.21, silu_and_mul_masked_post_quant.cuh.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if swiglu_limit is not None:
        limit = float(torch.tensor(swiglu_limit, dtype=gate_up.dtype))
        gate = gate.nan_to_num(nan=limit, neginf=-torch.inf).clamp_(max=limit)
        up = up.nan_to_num(nan=-limit).clamp_(-limit, limit)
    return _silu(gate).mul_(up.to(torch.float32))


def silu_rounded_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate)`` rounded to bf16, then times ``up`` and rounded to bf16 again; no clamp.

    Args:
        gate_up: [M, 2I] bf16, gate columns first.

    Returns:
        [M, I] bf16

    Source: SGLang 0.5.21, the masked runner without a limit: silu_and_mul on bf16.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return _silu(gate).to(torch.bfloat16) * up


def _silu(gate: Tensor) -> Tensor:
    """``gate / (1 + exp(-gate))`` in fp32."""
    wide = gate.to(torch.float32)
    return wide / wide.neg().exp_().add_(1)

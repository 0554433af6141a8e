"""Gated activations between the two GEMMs."""

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor, swiglu_limit: float | None) -> Tensor:
    """``silu(gate) * up`` in fp32, rounded to bf16 once.

    With a limit the gate is clamped from above and the up half from both sides, in bf16; a NaN
    meets the hardware's min and max, which return the other operand.

    Args:
        gate_up: [M, 2I] bf16, gate columns first.
        swiglu_limit: clamp, or None.

    Returns:
        [M, I] bf16

    Source: SGLang 0.5.21, silu_and_mul_clamp and _legacy_silu_and_mul.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if swiglu_limit is not None:
        limit = float(torch.tensor(swiglu_limit, dtype=gate_up.dtype))
        gate = gate.nan_to_num(nan=limit, neginf=-torch.inf).clamp_(max=limit)
        up = up.nan_to_num(nan=-limit).clamp_(-limit, limit)
    wide = gate.to(torch.float32)
    silu = wide / wide.neg().exp_().add_(1)
    return silu.mul_(up.to(torch.float32)).to(torch.bfloat16)

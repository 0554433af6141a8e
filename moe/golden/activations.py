"""The gated activations in float64, and where each layout's kernel stores bf16 on its way."""

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import Tensor

from moe.formats import ActivationKind, GatedActivation, GemmLayout, ScaleFormat
from moe.golden.number_formats import round_bf16


class Stores(StrEnum):
    """What is stored as bf16 between GEMM1 and the quantiser in front of GEMM2."""

    NOTHING = "nothing"
    PRODUCT = "product"
    SILU_AND_PRODUCT = "silu and product"


def stores_of(rule: GatedActivation, layout: GemmLayout, scale_format: ScaleFormat) -> Stores:
    """Kernels of slabs quantise from fp32, but silu's without a clamp, which stores twice.

    Segments store the product once, but for situ with power-of-two scales and where the product is
    kept; without a quantiser everything is stored once.

    Args:
        rule: the activation.
        layout: of the grouped rows.
        scale_format: of the quantiser behind it; NONE: there is none.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_run_contiguous_gemm, _run_masked_gemm.
    """
    if scale_format is ScaleFormat.NONE:
        return Stores.PRODUCT
    in_slabs, is_situ = layout is GemmLayout.MASKED, rule.kind is ActivationKind.SITU
    if rule.keeps_fp32 or (is_situ and scale_format is ScaleFormat.UE8M0):
        return Stores.NOTHING
    if not in_slabs:
        return Stores.PRODUCT
    plain_silu = rule.kind is ActivationKind.SILU and rule.limit is None
    return Stores.SILU_AND_PRODUCT if plain_silu else Stores.NOTHING


def gated(gate_up: Tensor, rule: GatedActivation) -> Tensor:
    """The activation without rounding.

    Clamps are the hardware's minimum and maximum, which return the operand that is not NaN: with a
    limit L a NaN gate counts as L and a NaN up as -L.

    Args:
        gate_up: [R, 2I] float64, gate columns first.
        rule: the formula; see there.

    Returns:
        [R, I] float64.

    Source: SGLang 0.5.21, silu_and_mul_masked_post_quant.cuh; ep_moe/kernels.py.
    """
    gate, up = clamped(gate_up, rule.limit)
    return _product(gate, up if rule.kind is not ActivationKind.OAI_SWIGLU else up + 1.0, rule)


def gated_as_stored(
    gate_up: Tensor,
    rule: GatedActivation,
    stores: Stores,
    store: Callable[[Tensor], Tensor] = round_bf16,
) -> Tensor:
    """[R, I] the activation of [R, 2I] traced or stored bf16 values, with its stores.

    A limit is compared in bf16, with the gate of oai_swiglu in fp32; alpha is an fp32 number, and
    ``up + 1`` is stored. ``store`` rounds the dtype of the values to bf16.
    """
    gate, up = clamped_as_stored(gate_up, rule)
    if rule.kind is ActivationKind.OAI_SWIGLU:
        up = store(up + 1.0)
    if stores is Stores.SILU_AND_PRODUCT:
        return store(store(gate * _logistic(gate)) * up)
    product = _product(gate, up, rule)
    return product if stores is Stores.NOTHING else store(product)


def clamped_as_stored(gate_up: Tensor, rule: GatedActivation) -> tuple[Tensor, Tensor]:
    """``clamped`` by the limit as the kernels hold it."""
    if rule.limit is None:
        return clamped(gate_up, None)
    limit = torch.tensor(rule.limit, dtype=torch.float64)
    of_up = float(round_bf16(limit))
    gate, up = clamped(gate_up, of_up)
    if rule.kind is ActivationKind.OAI_SWIGLU:
        gate, _ = clamped(gate_up, float(limit.to(torch.float32)))
    return gate, up


def clamped(gate_up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """(gate at most the limit, up within both, [R, I] each); None: as they are."""
    gate, up = gate_up.chunk(2, dim=1)
    if limit is None:
        return gate, up
    gate = gate.clamp(max=limit).nan_to_num_(nan=limit, neginf=-torch.inf)
    return gate, up.clamp(-limit, limit).nan_to_num_(nan=-limit)


def _product(gate: Tensor, up: Tensor, rule: GatedActivation) -> Tensor:
    """Both halves, clamped and shifted already, to their gated product."""
    alpha = float(torch.tensor(rule.alpha or 1.0, dtype=torch.float32))  # the kernels hold it so
    match rule.kind:
        case ActivationKind.SILU:
            return gate / (1.0 + torch.exp(-gate)) * up
        case ActivationKind.OAI_SWIGLU:
            return gate * _logistic(alpha * gate) * up
        case ActivationKind.SITU:
            assert rule.linear_limit is not None
            bent = alpha * torch.tanh(gate / alpha) * _logistic(gate)
            return bent * rule.linear_limit * torch.tanh(up / rule.linear_limit)


def _logistic(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))

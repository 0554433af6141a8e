"""Faults of the gated activation: clamps that are missing or misplaced, and other formulas.

A fault acts on experts that compute what its parameters say, and leaves those of another model
alone.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from moe.activation import gated_product
from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import live_places, rows_at, with_rows
from moe.formats import ActivationKind, GatedActivation, ScaleFormat, Stage
from moe.grouped_gemm import TorchGemm
from moe.quant.fp8 import quantize_groups, quantize_groups_fused
from moe.quant.ue8m0 import row_major
from moe.runner import RunnerCore
from moe.stages import ActivationOutput, SharedExpertOutput, TailOutput
from moe.weights import ExpertMatrix

Formula = Callable[[Tensor], Tensor]
"""[R, 2I] bf16, gate columns first -> [R, I] fp32."""

_TWO_STORES: Final = 2.0**-7
"""Relative distance that two bf16 stores may bring between a product and a formula."""


def routed_no_clamp(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """Routed experts do not clamp gate and up."""
    due = _clamping(context)
    return _routed_by(middle, context, due, _unclamped(due))


def clamp_after_product(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """The product is clamped instead of gate and up."""
    due, limit = _clamping(context), float(context.params["limit"])
    product = _unclamped(due)
    return _routed_by(middle, context, due, lambda gate_up: product(gate_up).clamp_(-limit, limit))


def activation_plain_silu(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """Routed experts compute ``silu(gate) * up``, whatever their model says.

    By reading of SGLang 0.5.21, moe_runner/deep_gemm.py: so do its bf16 experts, and an oai_swiglu
    in the compact layout.
    """
    places, gate_up = _live_gate_up(context)
    stored, plain = rows_at(middle.activation, places), GatedActivation()
    if _computes(plain, stored, gate_up):
        return middle
    product = gated_product(gate_up, plain)
    differs = (product.to(stored.dtype) != stored).any(1)
    return _with_products(middle, places[differs], product[differs])


def up_without_one(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """An oai_swiglu multiplies by up, not by ``up + 1``."""
    due = _clamping(context)

    def product(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        without_up = torch.cat([gate, torch.zeros_like(up)], dim=-1)
        return gated_product(gate_up, due) - gated_product(without_up, due)

    return _routed_by(middle, context, due, product)


def situ_tan(middle: ActivationOutput, context: FaultContext) -> ActivationOutput:
    """A situ bends gate and up by tan, not by tanh."""
    alpha, linear_limit = (float(context.params[name]) for name in ("alpha", "linear_limit"))
    due = GatedActivation(kind=ActivationKind.SITU, alpha=alpha, linear_limit=linear_limit)

    def product(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
        bent = alpha * torch.tan(gate / alpha) * torch.sigmoid(gate)
        return bent * linear_limit * torch.tan(up / linear_limit)

    return _routed_by(middle, context, due, product)


def shared_no_clamp(finished: TailOutput, context: FaultContext) -> TailOutput:
    """The shared expert does not clamp gate and up."""
    shared, due = finished.shared, _clamping(context)
    if shared is None or shared.gate_up.numel() == 0:
        return finished
    if not _computes(due, shared.activation, shared.gate_up):
        return finished
    w2 = context.seen[Stage.WEIGHTS].shared.w2
    return _with_shared(finished, _down_again(shared, w2, replace(due, limit=None)))


def _clamping(context: FaultContext) -> GatedActivation:
    """What the experts are said to compute: an oai_swiglu where alpha is not 0, else a silu."""
    limit, alpha = float(context.params["limit"]), float(context.params["alpha"])
    if alpha:
        return GatedActivation(kind=ActivationKind.OAI_SWIGLU, limit=limit, alpha=alpha)
    return GatedActivation(limit=limit)


def _unclamped(rule: GatedActivation) -> Formula:
    free = replace(rule, limit=None)
    return lambda gate_up: gated_product(gate_up, free)


def _routed_by(
    middle: ActivationOutput, context: FaultContext, due: GatedActivation, formula: Formula
) -> ActivationOutput:
    """The same by ``formula``, in rows where that is not the product of ``due``."""
    places, gate_up = _live_gate_up(context)
    if not _computes(due, rows_at(middle.activation, places), gate_up):
        return middle
    wrong = formula(gate_up)
    differs = (wrong != gated_product(gate_up, due)).any(1)
    return _with_products(middle, places[differs], wrong[differs])


def _live_gate_up(context: FaultContext) -> tuple[Tensor, Tensor]:
    """([R] places of the rows that hold a route, [R, 2I] bf16 what GEMM1 made of them)."""
    places = live_places(context.seen[Stage.PRE_PERMUTE].rows)
    return places, rows_at(context.seen[Stage.GEMM1].gate_up, places)


def _computes(rule: GatedActivation, activation: Tensor, gate_up: Tensor) -> bool:
    """Whether rows [R, I], however they were stored, are what a rule makes of [R, 2I]."""
    stored, smallest = activation.to(torch.float32), torch.finfo(torch.bfloat16).tiny
    product = gated_product(gate_up, rule)
    return torch.allclose(stored, product, rtol=_TWO_STORES, atol=smallest, equal_nan=True)


def _with_products(middle: ActivationOutput, places: Tensor, product: Tensor) -> ActivationOutput:
    """``product`` [R, I] fp32 in these places, stored and quantised as what was there."""
    if places.numel() == 0:
        return middle
    rows, scale = product.to(middle.activation.dtype), middle.hidden_states_scale
    activation = with_rows(middle.activation, places, rows)
    if scale is None:
        return replace(middle, activation=activation, hidden_states=activation)
    quantize = quantize_groups_fused if rows.dtype == torch.float32 else quantize_groups
    group_size = _group_size(rows_at(scale, places), rows.shape[1])
    quantized = quantize(rows, _scale_format(scale), group_size=group_size)
    return ActivationOutput(
        activation=activation,
        hidden_states=with_rows(middle.hidden_states, places, quantized.values),
        hidden_states_scale=with_rows(scale, places, quantized.scale),
    )


def _scale_format(scale: Tensor) -> ScaleFormat:
    return ScaleFormat.UE8M0 if scale.dtype == torch.int32 else ScaleFormat.FP32


def _group_size(scale: Tensor, width: int) -> int:
    """Columns that a scale covers, by the first of some rows' scales.

    No group has the byte 0: the quantisers' floor is far above its scale.
    """
    first = scale[:1]
    groups = row_major(first).view(torch.uint8) if first.dtype == torch.int32 else first
    return width // int(groups.count_nonzero())


def _down_again(
    shared: SharedExpertOutput, w2: ExpertMatrix, rule: GatedActivation
) -> SharedExpertOutput:
    """The dense path from its gate and up on, with another activation."""
    runner = _dense_runner(shared, rule)
    middle = runner.activate_dense(shared.gate_up)
    rows, scale = middle.hidden_states, middle.hidden_states_scale
    return replace(
        shared,
        activation=middle.activation,
        hidden_states=rows,
        hidden_states_scale=scale,
        output=runner.gemm.gemm_nt(rows, scale, runner.gemm.load(w2), runner.middle_group),
    )


def _dense_runner(shared: SharedExpertOutput, rule: GatedActivation) -> RunnerCore:
    """Who activates and quantises as the shared expert did, by another rule."""
    scale = shared.hidden_states_scale
    if scale is None:
        return RunnerCore(
            gemm=TorchGemm(), activation=rule, scale_format=ScaleFormat.NONE, quantize=None
        )
    scale_format, group_size = _scale_format(scale), _group_size(scale, shared.activation.shape[1])
    return RunnerCore(
        gemm=TorchGemm(),
        activation=rule,
        scale_format=scale_format,
        quantize=partial(quantize_groups, scale_format=scale_format, group_size=group_size),
        middle_group=group_size,
    )


def _with_shared(finished: TailOutput, shared: SharedExpertOutput) -> TailOutput:
    """The output with what another shared expert adds; a summand that waits for its sum, too."""
    assert finished.shared is not None
    more = shared.output.to(torch.float32) - finished.shared.output.to(torch.float32)
    output = (finished.output.to(torch.float32) + more).to(torch.bfloat16)
    waits = finished.summand is not None and finished.reduced is None
    summand = output if waits else finished.summand
    return replace(finished, shared=shared, output=output, summand=summand)


ACTIVATION_FAULTS: Final = (
    value_fault(
        Stage.ACTIVATION,
        routed_no_clamp,
        "gate and up of routed experts not clamped",
        "vllm-project/vllm-ascend#14363; vllm-project/vllm#42855",
        limit=10.0,
        alpha=0.0,
    ),
    value_fault(
        Stage.ACTIVATION,
        clamp_after_product,
        "the product of gate and up clamped, where they are due to be",
        "vllm-project/vllm-ascend#9590",
        limit=10.0,
        alpha=0.0,
    ),
    value_fault(
        Stage.ACTIVATION,
        activation_plain_silu,
        "silu(gate) * up computed whatever activation the model has",
        "sglang-0.5.21; sgl-project/DeepGEMM#87",
    ),
    value_fault(
        Stage.ACTIVATION,
        up_without_one,
        "an oai_swiglu without the 1 that belongs to up",
        "vllm-project/vllm#45738",
        limit=7.0,
        alpha=1.702,
    ),
    value_fault(
        Stage.ACTIVATION,
        situ_tan,
        "a situ with tan, where tanh is due",
        "our own reading of a published description",
        alpha=4.0,
        linear_limit=25.0,
    ),
    value_fault(
        Stage.TAIL,
        shared_no_clamp,
        "gate and up of the shared expert not clamped",
        "sgl-project/sglang#23776",
        limit=10.0,
        alpha=0.0,
    ),
)

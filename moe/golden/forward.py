"""The whole MoE layer in float64, without rounding or with the recipe's own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.golden.model import GoldenModel, GoldenTrace, GoldenWeights
from moe.golden.number_formats import round_bf16
from moe.golden.quantize import quantize_groups
from moe.golden.stages import (
    gated_silu,
    route_weights,
    router_scores,
    select_experts,
    tail,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arithmetic:
    """Where values are rounded: nowhere, or at the recipe's own rounding points."""

    store: Callable[[Tensor], Tensor]
    quantize: Callable[[Tensor], Tensor]
    limit: float | None
    expert_rank: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MlpRows:
    """One gated MLP over some rows: gate_up [R, 2I], activation [R, I], output [R, H]."""

    gate_up: Tensor
    activation: Tensor
    output: Tensor


def golden_forward(
    model: GoldenModel,
    weights: GoldenWeights,
    hidden_states: Tensor,
    *,
    rounding: bool,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
) -> GoldenTrace:
    """Compute shared(x) + routed_scaling_factor * sum over k of weight_k * expert_k(x).

    Args:
        model: what the layer computes.
        weights: in float64, on the device of the hidden states.
        hidden_states: [T, H], any float dtype whose values are the layer's input; T may be 0.
        rounding: False is ``ideal``: no rounding anywhere. True is ``same_recipe``: the recipe's
            quantisers, and a bf16 store after GEMM1, the activation, GEMM2, each rank's partial
            sum, combine, the shared expert and the tail. Every sum is a float64 sum. The router
            is float64 in both: its float32 stores belong to the router's band.
        topk_ids: [T, K] integers, pinned routes, -1 = dropped; None: the router's.
        topk_weights: [T, K], pinned weights; None: the router's at the ids in use.

    Raises:
        ValueError: expert_rank does not name one rank for each expert.

    Source: SGLang 0.5.21, srt/models/deepseek_v4.py; rounding points: deepep_normal.
    """
    num_experts = weights.gate_weight.shape[0]
    if len(model.expert_rank) != num_experts:
        raise ValueError(f"expert_rank names {len(model.expert_rank)} of {num_experts} experts")
    x = hidden_states.to(torch.float64)
    arithmetic = _recipe_arithmetic(model) if rounding else _ideal_arithmetic(model)
    logits = x @ weights.gate_weight.T
    ids, route_weight = _route(model, weights, logits, topk_ids, topk_weights)
    dispatched = arithmetic.quantize(x)
    rows = _run_experts(weights, dispatched, ids, arithmetic)
    routed = _combine(rows.output, route_weight, ids, arithmetic)
    shared = _run_shared(weights, dispatched, arithmetic)
    return GoldenTrace(
        logits=logits,
        topk_ids=ids,
        topk_weights=route_weight,
        dispatched=dispatched,
        gate_up=rows.gate_up,
        activation=rows.activation,
        expert_output=rows.output,
        routed=routed,
        shared=shared,
        output=arithmetic.store(tail(routed, shared, model.routed_scaling_factor).value),
    )


def _ideal_arithmetic(model: GoldenModel) -> _Arithmetic:
    def keep(x: Tensor) -> Tensor:
        return x

    one_rank = (0,) * len(model.expert_rank)
    return _Arithmetic(store=keep, quantize=keep, limit=model.swiglu_limit, expert_rank=one_rank)


def _recipe_arithmetic(model: GoldenModel) -> _Arithmetic:
    group_size = model.activation_group

    def quantize(x: Tensor) -> Tensor:
        if group_size is None:
            return x
        return quantize_groups(x, model.scale_format, group_size).dequantized

    limit = model.swiglu_limit
    if limit is not None:  # the clamp compares bf16 values
        limit = float(round_bf16(torch.tensor(limit, dtype=torch.float64)))
    return _Arithmetic(
        store=round_bf16, quantize=quantize, limit=limit, expert_rank=model.expert_rank
    )


def _route(
    model: GoldenModel,
    weights: GoldenWeights,
    logits: Tensor,
    pinned_ids: Tensor | None,
    pinned_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Ids [T, K] int64 and weights [T, K] float64: the pinned ones, else the router's."""
    if pinned_ids is None:
        free = select_experts(logits, weights.correction_bias, model.top_k, model.renormalize)
        ids, route_weight = free.ids, free.weights
    else:
        ids = pinned_ids.to(torch.int64)
        route_weight = route_weights(router_scores(logits), ids, model.renormalize)
    return ids, route_weight if pinned_weights is None else pinned_weights.to(torch.float64)


def _run_experts(
    weights: GoldenWeights, dispatched: Tensor, ids: Tensor, arithmetic: _Arithmetic
) -> _MlpRows:
    """Every route's row through its expert: [T, H] and [T, K] to rows [T, K, ...]."""
    num_slots, top_k, width = ids.numel(), ids.shape[1], weights.intermediate_size
    slots = _MlpRows(
        gate_up=dispatched.new_zeros(num_slots, 2 * width),
        activation=dispatched.new_zeros(num_slots, width),
        output=dispatched.new_zeros(num_slots, dispatched.shape[1]),
    )
    for expert, routes in _routes_by_expert(ids, len(arithmetic.expert_rank)):
        done = _run_mlp(dispatched[routes // top_k], weights.expert(expert), arithmetic)
        slots.gate_up[routes] = done.gate_up
        slots.activation[routes] = done.activation
        slots.output[routes] = done.output
    return _MlpRows(
        gate_up=slots.gate_up.view(*ids.shape, 2 * width),
        activation=slots.activation.view(*ids.shape, width),
        output=slots.output.view(*ids.shape, dispatched.shape[1]),
    )


def _routes_by_expert(ids: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert that has routes, and those routes as positions in the flat [T * K] slots."""
    flat = ids.flatten()
    num_routes = torch.bincount(flat[flat >= 0], minlength=num_experts).tolist()
    routes = flat.argsort(stable=True)[int((flat < 0).sum()) :]
    start = 0
    for expert, num in enumerate(num_routes):
        if num:
            yield expert, routes[start : start + num]
        start += num


def _run_mlp(x: Tensor, w13_w2: tuple[Tensor, Tensor], arithmetic: _Arithmetic) -> _MlpRows:
    """One gated MLP over rows [R, H] that are quantised already."""
    w13, w2 = w13_w2
    gate_up = arithmetic.store(x @ w13.T)
    hidden = arithmetic.store(gated_silu(gate_up, arithmetic.limit))
    activation = arithmetic.quantize(hidden)
    return _MlpRows(
        gate_up=gate_up, activation=activation, output=arithmetic.store(activation @ w2.T)
    )


def _combine(rows: Tensor, route_weight: Tensor, ids: Tensor, arithmetic: _Arithmetic) -> Tensor:
    """Each rank's weighted sum of its own rows [T, K, H], stored; then their sum [T, H], stored.

    A rank's partial stands at the token's first slot on that rank, so memory does not grow with
    the number of ranks.
    """
    expert_rank = torch.tensor(arithmetic.expert_rank, device=rows.device)
    rank = expert_rank[ids.clamp(min=0)]
    owner = (rank.unsqueeze(2) == rank.unsqueeze(1)).int().argmax(dim=2)
    token = torch.arange(rows.shape[0], device=rows.device)
    partials = torch.zeros_like(rows)
    for slot in range(rows.shape[1]):
        partials[token, owner[:, slot]] += route_weight[:, slot, None] * rows[:, slot]
    total = rows.new_zeros(rows.shape[0], rows.shape[2])
    for partial in partials.unbind(dim=1):
        total += arithmetic.store(partial)
    return arithmetic.store(total)


def _run_shared(
    weights: GoldenWeights, dispatched: Tensor, arithmetic: _Arithmetic
) -> Tensor | None:
    """The shared expert's output [T, H] for every token, or None where the layer has none."""
    w13_w2 = weights.shared()
    return None if w13_w2 is None else _run_mlp(dispatched, w13_w2, arithmetic).output

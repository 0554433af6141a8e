"""Composes one rank's layer from the plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from actors.plan import LayerPlan
from moe.dispatch import Dispatcher
from moe.dispatch.deepep_normal import DeepEpNormalDispatcher
from moe.dispatch.standard import StandardDispatcher
from moe.formats import DispatchFormat, ScaleFormat, SharedExpertMode
from moe.glue import FP8_WIRE, Glue
from moe.grouped_gemm import GemmBackend
from moe.layer import MoeLayer, Router
from moe.permute import PermuteContext, permute_pair
from moe.placement import ExpertPlacement
from moe.quant.fp8 import QuantizedRows, quantize_groups, quantize_groups_fused
from moe.random_tensors import seeded
from moe.runner import LoadedExperts, RunnerCore
from moe.shards import shard_experts
from moe.tail import (
    ReplicatedSharedTail,
    SharedAfterSumTail,
    SharedBeforeSumTail,
    SharedExpert,
    Tail,
)
from moe.weights import ExpertWeights, LayerWeights, checkpoint_weights, prepare_weights
from topology.collectives import Collectives
from topology.sync import PADDING, Reducer

Quantize = Callable[[Tensor], QuantizedRows]
"""bf16 rows -> codes and scales."""


def placement(plan: LayerPlan) -> ExpertPlacement:
    """Which rank of the EP group holds which expert."""
    return ExpertPlacement(
        num_experts=plan.num_experts,
        ep_size=plan.layout.ep,
        redundant=plan.redundant,
        shuffled_by=plan.shuffled_by,
    )


def rank_weights(plan: LayerPlan, rank: int) -> LayerWeights:
    """What a rank holds, as its GEMMs read it: whole experts or shards of them."""
    moe = plan.layout.moe
    held = placement(plan).local_experts(moe.coord(rank, "ep"))
    whole = checkpoint_weights(plan.weights, held)
    shared = whole.shared
    if shared is not None and plan.shared is SharedExpertMode.TP_SHARDED:
        shared = shard_experts(shared, rank, plan.layout.world_size)
    experts = whole.experts
    if plan.layout.moe_tp > 1:
        experts = shard_experts(experts, moe.coord(rank, "tp"), plan.layout.moe_tp)
    sharded = replace(whole, experts=experts, shared=shared)
    return prepare_weights(sharded, plan.recipe, plan.scale_format)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedLayer:
    """Prepared weights of one rank after the GEMM backend has taken them over.

    weights  gate and bias are read from here
    experts  its routed experts
    shared   the shared expert, or None
    """

    weights: LayerWeights
    experts: LoadedExperts
    shared: LoadedExperts | None


def load_layer(gemm: GemmBackend, weights: LayerWeights) -> LoadedLayer:
    """Hand prepared weights to the GEMM backend, once."""
    return LoadedLayer(
        weights=weights,
        experts=_load_experts(gemm, weights.experts),
        shared=_load_experts(gemm, weights.shared) if weights.shared else None,
    )


def _load_experts(gemm: GemmBackend, weights: ExpertWeights) -> LoadedExperts:
    return LoadedExperts(w13=gemm.load(weights.w13), w2=gemm.load(weights.w2))


def build_layer(
    plan: LayerPlan, collectives: Collectives, gemm: GemmBackend, loaded: LoadedLayer
) -> MoeLayer:
    """The layer of ``collectives.rank``.

    Args:
        plan: the layer and its topology.
        collectives: this rank's verbs.
        gemm: who multiplies.
        loaded: this rank's weights.
    """
    quantize, quantize_fused = _quantizers(plan.scale_format)
    runner = RunnerCore(
        gemm=gemm,
        quantize=quantize,
        swiglu_limit=plan.swiglu_limit,
        quantize_fused=quantize_fused,
    )
    shared = None
    if loaded.shared is not None:
        shared = SharedExpert(weights=loaded.shared, runner=runner, quantize=quantize)
    is_local = plan.shared is SharedExpertMode.LOCAL
    return MoeLayer(
        glue=Glue(
            plan=plan.sync,
            layout=plan.layout,
            collectives=collectives,
            wire=FP8_WIRE if plan.gathers_fp8 else None,
        ),
        route=_router(plan, collectives.rank, loaded.weights),
        placement=placement(plan),
        dispatcher=_DISPATCHERS[plan.dispatch_format](plan, collectives, quantize),
        permute=permute_pair(plan.dispatch_format, plan.runner),
        permute_context=_permute_context(plan, quantize),
        runner=runner,
        experts=loaded.experts,
        tail=_tail(plan, collectives, None if is_local else shared),
        local_shared=shared if is_local else None,
    )


def _quantizers(scale_format: ScaleFormat) -> tuple[Quantize | None, Quantize | None]:
    """Of stored bf16 rows, and of the fp32 rows of a fused activation; None for bf16 recipes."""
    if scale_format is ScaleFormat.NONE:
        return None, None
    return (
        partial(quantize_groups, scale_format=scale_format),
        partial(quantize_groups_fused, scale_format=scale_format),
    )


def _router(plan: LayerPlan, rank: int, weights: LayerWeights) -> Router:
    is_padding = torch.tensor(plan.sync.layer[rank], dtype=torch.int64) == PADDING
    return Router(
        gate_weight=weights.gate_weight,
        correction_bias=weights.correction_bias,
        tid2eid=weights.tid2eid,
        rule=plan.routing,
        is_unrouted=is_padding if plan.sync.masks_padding else None,
    )


def _permute_context(plan: LayerPlan, quantize: Quantize | None) -> PermuteContext:
    where = placement(plan)
    return PermuteContext(
        num_local_experts=where.num_local_experts,
        num_experts=where.num_slots,
        layout=plan.gemm_layout,
        row_alignment=plan.row_alignment,
        routed_scaling_factor=plan.routed_scaling_factor,
        quantize=quantize,
    )


def _standard(
    plan: LayerPlan, collectives: Collectives, quantize: Quantize | None
) -> StandardDispatcher:
    return StandardDispatcher(
        num_local_experts=placement(plan).num_local_experts,
        ep_rank=plan.layout.moe.coord(collectives.rank, "ep"),
    )


def _deepep_normal(
    plan: LayerPlan, collectives: Collectives, quantize: Quantize | None
) -> DeepEpNormalDispatcher:
    return DeepEpNormalDispatcher(
        collectives=collectives,
        group=plan.layout.ep_group(collectives.rank),
        num_local_experts=placement(plan).num_local_experts,
        expert_alignment=plan.row_alignment,
        quantize=quantize,
        arrival_seed=seeded(plan.seed, "arrival", collectives.rank).initial_seed(),
    )


_DISPATCHERS: Final[
    Mapping[DispatchFormat, Callable[[LayerPlan, Collectives, Quantize | None], Dispatcher]]
] = MappingProxyType(
    {
        DispatchFormat.STANDARD: _standard,
        DispatchFormat.DEEPEP_NORMAL: _deepep_normal,
    }
)


def _tail(plan: LayerPlan, collectives: Collectives, shared: SharedExpert | None) -> Tail:
    """Where the shared expert and the reduction act, by dispatcher and plan."""
    if plan.sync.reducer is Reducer.COMBINE:
        return ReplicatedSharedTail(shared=shared, routed_scaling_factor=plan.routed_scaling_factor)
    reduce = None
    if plan.sync.reducer is Reducer.TAIL:
        reduce = partial(collectives.all_reduce, group=plan.layout.world)
    if plan.shared is SharedExpertMode.REPLICATED and shared is not None:
        if reduce is not None:
            return SharedAfterSumTail(shared=shared, reduce=reduce)
        shared = shared if collectives.rank == 0 else None  # the sum behind it must see one
    return SharedBeforeSumTail(shared=shared, reduce=reduce)

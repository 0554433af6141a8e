"""Composes one rank's layer from the plan."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from actors.dispatchers import DISPATCHERS, Quantize, Wiring, placement
from actors.kernels import row_kernels
from actors.plan import LayerPlan
from moe.devices import weights_on
from moe.dispatch.buffers import MessageBuffers
from moe.formats import ActivationKind, ScaleFormat, SharedExpertMode
from moe.gemm_backend import GemmBackend
from moe.glue import FP8_WIRE, Glue
from moe.layer import MoeLayer, Router
from moe.permute import PermuteContext, permute_pair
from moe.quant.fp8 import (
    QuantizedRows,
    quantize_groups_fused,
    requantize_groups,
)
from moe.random_tensors import seeded
from moe.row_kernels import FusedActivation, RowKernels
from moe.runner import LoadedExperts, RunnerCore
from moe.shards import shard_experts
from moe.tail import (
    ReplicatedSharedTail,
    SharedAfterSumTail,
    SharedBeforeSumTail,
    SharedExpert,
    Tail,
)
from moe.weight_preparation import prepare_weights
from moe.weights import ExpertWeights, LayerWeights, checkpoint_weights
from topology.collectives import Collectives
from topology.sync import PADDING, Reducer


def rank_weights(plan: LayerPlan, rank: int) -> LayerWeights:
    """What a rank holds, as its GEMMs read it: whole experts or shards of them."""
    moe = plan.layout.moe
    held = placement(plan).local_experts(moe.coord(rank, "ep"))
    source = weights_on(plan.weights, plan.device)
    whole = checkpoint_weights(source, held)
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
    plan: LayerPlan,
    collectives: Collectives,
    gemm: GemmBackend,
    loaded: LoadedLayer,
    buffers: MessageBuffers,
) -> MoeLayer:
    """The layer of ``collectives.rank``.

    Args:
        plan: the layer and its topology.
        collectives: this rank's verbs.
        gemm: who multiplies.
        loaded: this rank's weights.
        buffers: what its dispatcher keeps between forwards.
    """
    kernels = row_kernels(plan.kernels)
    quantize = _quantizer(kernels, plan.scale_format, plan.input_group)
    runner = _runner(plan, gemm, kernels)
    shared = _shared_expert(plan, gemm, kernels, loaded.shared)
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
        expert_hidden_size=plan.expert_hidden_size,
        dispatcher=DISPATCHERS[plan.dispatch_format](
            Wiring(plan=plan, collectives=collectives, quantize=quantize, buffers=buffers)
        ),
        permute=permute_pair(plan.dispatch_format, plan.runner),
        permute_context=_permute_context(plan, collectives.rank, quantize, kernels),
        runner=runner,
        experts=loaded.experts,
        tail=_tail(plan, collectives, None if is_local else shared),
        local_shared=shared if is_local else None,
    )


def _quantizer(kernels: RowKernels, scale_format: ScaleFormat, group_size: int) -> Quantize | None:
    """Of stored bf16 rows; None for bf16 recipes."""
    if scale_format is ScaleFormat.NONE:
        return None
    return partial(kernels.quantize_groups, scale_format=scale_format, group_size=group_size)


def _runner(plan: LayerPlan, gemm: GemmBackend, kernels: RowKernels) -> RunnerCore:
    """The routed experts' computation."""
    fused = partial(
        quantize_groups_fused,
        scale_format=plan.scale_format,
        group_size=plan.middle_group,
        by_division=plan.activation.kind is ActivationKind.OAI_SWIGLU,
    )
    return RunnerCore(
        gemm=gemm,
        activation=plan.activation,
        scale_format=plan.scale_format,
        quantize=_quantizer(kernels, plan.scale_format, plan.middle_group),
        quantize_fused=None if plan.scale_format is ScaleFormat.NONE else fused,
        input_group=plan.input_group,
        middle_group=plan.middle_group,
        fused=_fused_activation(plan, kernels, plan.middle_group),
    )


def _fused_activation(
    plan: LayerPlan, kernels: RowKernels, group_size: int
) -> FusedActivation | None:
    """One kernel for activation and quantiser, where these kernels have one."""
    if kernels.fused_activation is None:
        return None
    return kernels.fused_activation(plan.activation, plan.scale_format, group_size)


def _shared_expert(
    plan: LayerPlan, gemm: GemmBackend, kernels: RowKernels, weights: LoadedExperts | None
) -> SharedExpert | None:
    """The dense path, whose quantisers have groups of their own; None where there is none."""
    if weights is None:
        return None
    quantize = _quantizer(kernels, plan.scale_format, plan.dense_group)
    runner = RunnerCore(
        gemm=gemm,
        activation=plan.activation,
        scale_format=plan.scale_format,
        quantize=quantize,
        input_group=plan.dense_group,
        middle_group=plan.dense_group,
        fused=_fused_activation(plan, kernels, plan.dense_group),
    )
    return SharedExpert(weights=weights, runner=runner, quantize=quantize)


def _requantizer(
    plan: LayerPlan, kernels: RowKernels
) -> Callable[[Tensor, Tensor], QuantizedRows] | None:
    """Of rows whose wire has other scales than the GEMMs read; None where it has the same."""
    if plan.bf16_wire or plan.wire_format is plan.scale_format:
        return None
    return partial(
        requantize_groups,
        scale_format=plan.scale_format,
        group_size=plan.input_group,
        quantize=kernels.quantize_groups,
    )


def _router(plan: LayerPlan, rank: int, weights: LayerWeights) -> Router:
    rows = torch.tensor(plan.sync.layer[rank], dtype=torch.int64, device=plan.device)
    return Router(
        gate_weight=weights.gate_weight,
        correction_bias=weights.correction_bias,
        tid2eid=weights.tid2eid,
        rule=plan.routing,
        is_unrouted=rows == PADDING if plan.sync.masks_padding else None,
    )


def _permute_context(
    plan: LayerPlan, rank: int, quantize: Quantize | None, kernels: RowKernels
) -> PermuteContext:
    where = placement(plan)
    return PermuteContext(
        num_local_experts=where.num_local_experts,
        num_experts=where.num_slots,
        layout=plan.gemm_layout,
        row_alignment=plan.row_alignment,
        routed_scaling_factor=plan.routed_scaling_factor,
        quantize=quantize if plan.bf16_wire else None,  # else the wire is quantised
        requantize=_requantizer(plan, kernels),
        expert_start=plan.layout.moe.coord(rank, "ep") * where.num_local_experts,
        slot_order_seed=seeded(plan.seed, "slot order", rank).initial_seed(),
        caps_slabs=plan.caps_slabs,
        zeroes_padding=plan.zeroes_padding,
        wide_segments=plan.wide_segments,
        kernels=kernels,
    )


def _tail(plan: LayerPlan, collectives: Collectives, shared: SharedExpert | None) -> Tail:
    """Where the shared expert and the reduction act, by dispatcher and plan."""
    if plan.sync.reducer is Reducer.COMBINE:
        return ReplicatedSharedTail(shared=shared, routed_scaling_factor=plan.tail_scaling_factor)
    reduce = None
    if plan.sync.reducer is Reducer.TAIL:
        reduce = partial(collectives.all_reduce, group=plan.layout.world)
    if plan.shared is SharedExpertMode.REPLICATED and shared is not None:
        if reduce is not None:
            return SharedAfterSumTail(shared=shared, reduce=reduce)
        shared = shared if collectives.rank == 0 else None  # the sum behind it must see one
    return SharedBeforeSumTail(shared=shared, reduce=reduce)

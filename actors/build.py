"""Composes one rank's layer from the plan."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from actors.plan import LayerPlan
from moe.dispatch.deepep_normal import DeepEpNormalDispatcher
from moe.formats import ScaleFormat
from moe.grouped_gemm import GemmBackend
from moe.layer import MoeLayer, Router
from moe.permute import permute_pair
from moe.placement import ExpertPlacement
from moe.quant.fp8 import quantize_groups
from moe.random_tensors import seeded
from moe.runner import LoadedExperts, RunnerCore
from moe.tail import ReplicatedSharedTail
from moe.weights import ExpertWeights, LayerWeights
from topology.collectives import Collectives


def placement(plan: LayerPlan) -> ExpertPlacement:
    """Which rank of the EP group holds which expert."""
    return ExpertPlacement(num_experts=plan.num_experts, ep_size=plan.layout.ep)


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
) -> MoeLayer:
    """The layer of ``collectives.rank``: attention-DP x EP over an all-to-all.

    Args:
        plan: the layer and its topology.
        collectives: this rank's verbs.
        gemm: who multiplies.
        loaded: this rank's weights.
    """
    where = placement(plan)
    quantize = None
    if plan.scale_format is not ScaleFormat.NONE:
        quantize = partial(quantize_groups, scale_format=plan.scale_format)
    runner = RunnerCore(gemm=gemm, quantize=quantize, swiglu_limit=plan.swiglu_limit)
    return MoeLayer(
        glue_in=_local_rows,
        route=Router(
            gate_weight=loaded.weights.gate_weight,
            correction_bias=loaded.weights.correction_bias,
            rule=plan.routing,
        ),
        placement=where,
        dispatcher=DeepEpNormalDispatcher(
            collectives=collectives,
            group=plan.layout.ep_group(collectives.rank),
            num_local_experts=where.num_local_experts,
            expert_alignment=plan.row_alignment,
            quantize=quantize,
            arrival_seed=seeded(plan.seed, "arrival", collectives.rank).initial_seed(),
        ),
        permute=permute_pair(plan.dispatch_format, plan.runner),
        runner=runner,
        experts=loaded.experts,
        tail=ReplicatedSharedTail(
            shared=loaded.shared,
            runner=runner,
            quantize=quantize,
            routed_scaling_factor=plan.routed_scaling_factor,
        ),
        glue_out=_local_rows,
    )


def _local_rows(hidden_states: Tensor) -> Tensor:
    """Attention-DP with an all-to-all: a rank's rows go in and come out as they are."""
    return hidden_states

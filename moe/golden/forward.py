"""The whole MoE layer in float64, without rounding or with the recipe's own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.golden.mlp import (
    Arithmetic,
    MlpRows,
    SharedBranch,
    ideal_arithmetic,
    recipe_arithmetic,
    run_expert,
    run_shared,
)
from moe.golden.model import GoldenModel, GoldenTrace, GoldenWeights
from moe.golden.path import RoundingPath
from moe.golden.quantize import gathered_in_fp8
from moe.golden.rank_sums import RankSums
from moe.golden.routing import GoldenRouting, route_weights, router_scores, select_experts
from moe.golden.stages import tail
from moe.golden.twins import twin_arithmetic

Order = Callable[[int], Sequence[int]]


def golden_forward(
    model: GoldenModel,
    weights: GoldenWeights,
    hidden_states: Tensor,
    *,
    rounding: bool,
    input_ids: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    ep_ranks: Tensor | None = None,
) -> GoldenTrace:
    """Compute shared(x) + routed_scaling_factor * sum over k of weight_k * expert_k(x).

    Args:
        model: what the layer computes.
        weights: in float64, on the device of the hidden states.
        hidden_states: [T, H], any float dtype whose values are the layer's input; T may be 0.
        rounding: False is ``ideal``: no rounding anywhere. True is ``same_recipe``: the recipe's
            quantisers, and a bf16 store after GEMM1, the activation, GEMM2, each rank's partial
            sum, their sum, the shared expert and the last addition, as the model's path has them.
            Every sum is float64, and so is the router: its float32 stores belong to its band.
        input_ids: [T] integers, vocabulary ids, from which a hashed layer's experts come.
        topk_ids: [T, K] integers, pinned routes, -1 = dropped; None: the router's.
        topk_weights: [T, K], pinned weights; None: the router's at the ids in use.
        ep_ranks: [T, K] integers, the EP rank that computes each route, for experts that have
            replicas; None: the one that the path names.

    Raises:
        ValueError: path or routing do not fit the number of experts or an intermediate size.

    Source: SGLang 0.5.21, srt/models/deepseek_v4.py; rounding points: those of each dispatcher.
    """
    tokens = hidden_states.to(torch.float64)
    arithmetic = _arithmetic(model) if rounding else ideal_arithmetic(model)
    path, factor = arithmetic.path, model.routed_scaling_factor
    x = gathered_in_fp8(tokens) if path.gathers_fp8 else tokens
    logits = x @ weights.gate_weight.T
    ids, free = _route(model.routing, weights, logits, input_ids, topk_ids)
    route_weight = free if topk_weights is None else topk_weights.to(torch.float64)
    dispatched = arithmetic.dispatch(_widened(x, model.expert_hidden_size))
    shared = run_shared(tokens if path.shared_before_gather else x, weights.shared(), arithmetic)
    sums = _rank_sums(dispatched, factor, shared, arithmetic)
    if ep_ranks is None or not rounding:
        ep_ranks = _ep_ranks_of(path, ids, logits.shape[1])
    routes = _Routes(ids=ids, weights=route_weight, ep_ranks=ep_ranks)
    slots = _run_experts(weights, dispatched, routes, arithmetic, sums)
    summed = arithmetic.store(sums.total)[:, : x.shape[1]]
    output = tail(summed, shared.behind, 1.0 if path.folds_factor else factor).value
    return GoldenTrace(
        logits=logits,
        topk_ids=ids,
        topk_weights=route_weight,
        dispatched=dispatched,
        gate_up=slots.gate_up,
        activation=slots.activation,
        expert_output=slots.output,
        routed=sums.routed[:, : x.shape[1]] if path.folds_factor else summed,
        shared=shared.behind if shared.parts is None else sums.shared,
        output=arithmetic.store(output),
    )


def _arithmetic(model: GoldenModel) -> Arithmetic:
    """The recipe's rounding points, with the golden's sums or a twin's."""
    return recipe_arithmetic(model) if model.twin is None else twin_arithmetic(model, model.twin)


def _widened(x: Tensor, width: int | None) -> Tensor:
    """[T, H] with columns of zeros behind, where experts are padded."""
    return x if width is None else torch.nn.functional.pad(x, (0, width - x.shape[1]))


def _rank_sums(like: Tensor, factor: float, shared: SharedBranch, by: Arithmetic) -> RankSums:
    """The sums over ranks, with the factor where the path has it in them."""
    return RankSums(
        like,
        by.store_partial,
        factor if by.path.folds_factor else 1.0,
        shared.parts,
        scales_stored_sum=by.path.scales_stored_sum,
    )


def _ep_ranks_of(path: RoundingPath, ids: Tensor, num_experts: int) -> Tensor:
    """[T, K] the EP rank that the path names for each route."""
    by_expert = torch.tensor(path.rank_of_experts(num_experts), device=ids.device)
    return by_expert[ids.clamp(min=0)]


def _route(
    routing: GoldenRouting,
    weights: GoldenWeights,
    logits: Tensor,
    input_ids: Tensor | None,
    pinned_ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Ids [T, K] int64, the pinned ones or else the router's, and the router's weights of them."""
    if pinned_ids is not None:
        ids = pinned_ids.to(torch.int64)
        return ids, route_weights(router_scores(logits, routing), ids, routing)
    free = select_experts(
        logits,
        weights.correction_bias,
        routing,
        input_ids=input_ids,
        tid2eid=weights.tid2eid if routing.hashed else None,
    )
    return free.ids, free.weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Routes:
    """Where every slot goes: ids, weights and EP ranks, [T, K] each; id -1 goes nowhere."""

    ids: Tensor
    weights: Tensor
    ep_ranks: Tensor

    def by_rank(self, ep_size: int, order: Order) -> Iterator[Tensor]:
        """For each EP rank its routes, expert after expert, as positions in the flat slots."""
        ids, ranks = self.ids.flatten(), self.ep_ranks.flatten().to(torch.int64)
        routed = ids.argsort(stable=True)[int((ids < 0).sum()) :]
        routed = routed[ranks[routed].argsort(stable=True)]
        counts = torch.bincount(ranks[routed], minlength=ep_size)
        parts = torch.split(routed, counts.tolist())
        yield from (parts[rank] for rank in order(ep_size))

    def by_expert(self, routes: Tensor, order: Order) -> Iterator[tuple[int, Tensor]]:
        """Each expert of these routes with the places among them that hold it."""
        experts, counts = torch.unique_consecutive(self.ids.flatten()[routes], return_counts=True)
        places = torch.arange(routes.shape[0], device=routes.device)
        parts = torch.split(places, counts.tolist())
        yield from ((int(experts[place]), parts[place]) for place in order(len(parts)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slots:
    """What became of every route: gate_up [T, K, 2I], activation [T, K, I], output [T, K, H]."""

    gate_up: Tensor
    activation: Tensor
    output: Tensor


def _run_experts(
    weights: GoldenWeights,
    dispatched: Tensor,
    routes: _Routes,
    arithmetic: Arithmetic,
    sums: RankSums,
) -> _Slots:
    """Every route's row through its expert, rank after rank; what ranks add up goes to ``sums``."""
    width, hidden_size = weights.intermediate_size, dispatched.shape[1]
    slots = _Slots(
        gate_up=dispatched.new_zeros(*routes.ids.shape, 2 * width),
        activation=dispatched.new_zeros(*routes.ids.shape, width),
        output=dispatched.new_zeros(*routes.ids.shape, hidden_size),
    )
    for of_rank in routes.by_rank(arithmetic.path.ep_size, arithmetic.order):
        tokens, row = torch.unique(of_rank // routes.ids.shape[1], return_inverse=True)
        partials = dispatched.new_zeros(arithmetic.path.moe_tp, tokens.shape[0], hidden_size)
        for expert, places in routes.by_expert(of_rank, arithmetic.order):
            x, w13_w2 = dispatched[tokens[row[places]]], weights.expert(expert)
            done = run_expert(x, w13_w2, arithmetic)
            outputs = torch.stack([*done.outputs(partials.shape[0], arithmetic)])
            _keep(slots, of_rank[places], done, outputs)
            weight = arithmetic.store_weight(routes.weights.flatten()[of_rank[places], None])
            partials.index_add_(1, row[places], arithmetic.store_route(weight * outputs))
        for partial in partials:
            sums.add_rank(tokens, partial)
    return slots


def _keep(slots: _Slots, positions: Tensor, rows: MlpRows, outputs: Tensor) -> None:
    """Enter rows at their positions in the flat slots; ``outputs`` [P, R, H] are the shards'."""
    slots.gate_up.flatten(0, 1)[positions] = rows.gate_up
    slots.activation.flatten(0, 1)[positions] = rows.activation
    slots.output.flatten(0, 1)[positions] = outputs[0] if len(outputs) == 1 else outputs.sum(0)

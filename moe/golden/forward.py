"""The whole MoE layer in float64, without rounding or with the recipe's own."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.golden.mlp import (
    Arithmetic,
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
from moe.golden.slots import Keep, Slots, all_of_it
from moe.golden.stages import tail
from moe.golden.twins import twin_arithmetic

Order = Callable[[int], Sequence[int]]


def golden_forward(  # noqa: PLR0913  what is pinned comes tensor by tensor
    model: GoldenModel,
    weights: GoldenWeights,
    hidden_states: Tensor,
    *,
    rounding: bool,
    input_ids: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    ep_ranks: Tensor | None = None,
    keep: Keep = all_of_it,
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
        ep_ranks: [T, K] integers, the EP rank of each route, as replicas have it; None: the path's.
        keep: what the trace has of an expert's rows [N, C]; may be of another dtype.

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
    ranks = _ep_ranks_of(path, ids, logits.shape[1], ep_ranks if rounding else None)
    routes = _Routes(ids=ids, weights=route_weight, ep_ranks=ranks)
    slots = _Experts(weights, dispatched, routes, arithmetic).run(sums, keep)
    summed = arithmetic.store(sums.total)[:, : x.shape[1]]
    output = tail(summed, shared.behind, 1.0 if path.folds_factor else factor).value
    return GoldenTrace(
        logits=logits,
        topk_ids=ids,
        topk_weights=route_weight,
        dispatched=dispatched,
        gate_up=slots.gate_up.of(ids),
        activation=slots.activation.of(ids),
        expert_output=slots.output.of(ids),
        routed=sums.routed[:, : x.shape[1]] if path.folds_factor else summed,
        shared=shared.behind if shared.parts is None else sums.shared,
        output=arithmetic.store(output),
    )


def _arithmetic(model: GoldenModel) -> Arithmetic:
    """The recipe's rounding points, with the golden's sums or a twin's."""
    return recipe_arithmetic(model) if model.twin is None else twin_arithmetic(model, model.twin)


def _widened(x: Tensor, width: int | None) -> Tensor:
    """[T, H] with columns of zeros behind, where experts are padded."""
    missing = 0 if width is None else width - x.shape[1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _rank_sums(like: Tensor, factor: float, shared: SharedBranch, by: Arithmetic) -> RankSums:
    """The sums over ranks, with the factor where the path has it in them."""
    return RankSums(
        like,
        by.store_partial,
        factor if by.path.folds_factor else 1.0,
        shared.parts,
        scales_stored_sum=by.path.scales_stored_sum,
    )


def _ep_ranks_of(
    path: RoundingPath, ids: Tensor, num_experts: int, pinned: Tensor | None
) -> Tensor:
    """[T, K] the EP rank that is pinned for each route, or else that the path names."""
    if pinned is not None:
        return pinned
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


@dataclass(frozen=True, slots=True, eq=False)
class _Experts:
    """What routes meet.

    weights     of the experts
    dispatched  [T, H] what they read
    routes      which of it
    arithmetic  of their stages
    """

    weights: GoldenWeights
    dispatched: Tensor
    routes: _Routes
    arithmetic: Arithmetic

    def run(self, sums: RankSums, keep: Keep) -> Slots:
        """Every route's row through its expert; what ranks add up goes to ``sums``."""
        by, num_routes = self.arithmetic, self.routes.ids.numel()
        slots = Slots(num_routes, self.weights.intermediate_size, keep, self.dispatched)
        for of_rank in self.routes.by_rank(by.path.ep_size, by.order):
            self._run_rank(of_rank, slots, sums)
        return slots

    def _run_rank(self, of_rank: Tensor, slots: Slots, sums: RankSums) -> None:
        """Routes of one rank, as positions in the flat slots."""
        tokens, row = torch.unique(of_rank // self.routes.ids.shape[1], return_inverse=True)
        shape = self.arithmetic.path.moe_tp, tokens.shape[0], self.dispatched.shape[1]
        partials = self.dispatched.new_zeros(shape)
        for expert, places in self.routes.by_expert(of_rank, self.arithmetic.order):
            weighted = self._run_one(expert, of_rank[places], tokens[row[places]], slots)
            partials.index_add_(1, row[places], weighted)
        for partial in partials:
            sums.add_rank(tokens, partial)

    def _run_one(self, expert: int, positions: Tensor, tokens: Tensor, slots: Slots) -> Tensor:
        """[P, R, H] weighted outputs of one expert's routes, of each shard."""
        by = self.arithmetic
        done = run_expert(self.dispatched[tokens], self.weights.expert(expert), by)
        outputs = torch.stack([*done.outputs(by.path.moe_tp, by)])
        slots.enter(positions, done, outputs)
        weight = by.store_weight(self.routes.weights.flatten()[positions, None])
        return by.store_route(weight * outputs)

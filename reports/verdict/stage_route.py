"""Own error of the router: logits, chosen experts, top-k weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import Routes, route_weights, router_scores, select_experts
from reports.verdict.band import (
    SMALLEST_SCORE,
    fp32_noise,
    gemm_noise,
    score_noise,
    weight_noise,
)
from reports.verdict.captured import where_captured
from reports.verdict.compared import BAND, check_kept
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from reports.verdict.rules import ROUTER, check_routes, groups_the_run_may_use
from reports.verdict.stage_checks import product
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject


def check_route(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> Tensor:
    """Logits by the band, chosen experts by the router's rule, weights by the band.

    Returns:
        [all layer rows] bool: rows whose chosen experts are legal.
    """
    legal = torch.zeros(len(subject.layer_rows), dtype=torch.bool)
    for ranks in weights.ranks_with_equal_router():
        at = torch.isin(subject.layer_rows.rank, torch.tensor(ranks))
        with where_captured(ledger, "route/logits", BAND):
            _check_logits(subject, weights, ranks, ledger)
        with where_captured(ledger, "route/topk_ids", ROUTER):
            routed = _RoutedRows.of(subject, weights, ranks, ~subject.is_masked[at])
            legal[at] = _check_ids(routed, subject, ledger)
            with where_captured(ledger, "route/topk_weights", BAND):
                _check_weights(routed, subject, ledger)
    return legal


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _RoutedRows:
    """Rows of some ranks with the same router, and what they were routed by.

    is_routed  [T] bool; the others are padding that keeps out of routing
    logits     [T, E] float64, traced
    scores     [T, E] float64, the golden's at those logits
    noise      [T, E] or scalar: relative error declared of a score
    bias       [E] float64, or None
    table      [T, K] int64 experts of a hashed layer, or None
    pinned_ids, pinned_weights  [T, K], or None
    """

    ranks: Sequence[int]
    rows: Rows
    is_routed: Tensor
    logits: Tensor
    scores: Tensor
    noise: Tensor
    bias: Tensor | None
    table: Tensor | None
    pinned_ids: Tensor | None
    pinned_weights: Tensor | None

    @staticmethod
    def of(
        subject: Subject, weights: JudgedWeights, ranks: Sequence[int], is_routed: Tensor
    ) -> "_RoutedRows":
        """Collect them."""
        layer = subject.layer
        logits = subject.tensor_of(ranks, Stage.ROUTE, "logits").to(torch.float64)
        table = None
        if layer.routing.hashed:
            listed = weights.hash_table(ranks[0]).to(torch.int64)
            ids = subject.tensor_of(ranks, Stage.GLUE_IN, "input_ids")
            table = listed[ids.clamp(0, len(listed) - 1)]  # an id that is none is glue_in's error
        rows = subject.rows_of(ranks)
        return _RoutedRows(
            ranks=ranks,
            rows=rows,
            is_routed=is_routed,
            logits=logits,
            scores=router_scores(logits, layer.routing),
            noise=score_noise(layer.routing, logits, layer.arithmetic),
            bias=weights.router(ranks[0])[1],
            table=table,
            pinned_ids=_of_tokens(subject.batch.topk_ids, rows.token, -1),
            pinned_weights=_of_tokens(subject.batch.topk_weights, rows.token, 0),
        )


def _of_tokens(values: Tensor | None, tokens: Tensor, filler: int) -> Tensor | None:
    """Rows of these tokens, ``filler`` for a token of -1."""
    if values is None:
        return None
    return torch.cat([values, values.new_full((1, values.shape[1]), filler)])[tokens]


def _check_logits(
    subject: Subject, weights: JudgedWeights, ranks: Sequence[int], ledger: Ledger
) -> None:
    """The gate's product of the traced rows, summed in fp32."""
    x = subject.tensor_of(ranks, Stage.GLUE_IN, "hidden_states").to(torch.float64)
    want = product(x, weights.router(ranks[0])[0])
    unscaled = replace(subject.layer.arithmetic, scaled_block=None)  # the gate has no scales
    noise = gemm_noise(want.magnitude, x.shape[1], unscaled)
    check_kept(
        ledger,
        Stage.ROUTE,
        "logits",
        subject.rows_of(ranks),
        got=subject.tensor_of(ranks, Stage.ROUTE, "logits").to(torch.float64),
        want=want.value,
        band=noise + fp32_noise(want.value.abs(), 1),
    )


def _check_ids(routed: _RoutedRows, subject: Subject, ledger: Ledger) -> Tensor:
    """[T] bool: rows whose experts are those pinned, those of the table, or a legal choice."""
    ids = subject.tensor_of(routed.ranks, Stage.ROUTE, "topk_ids")
    due = routed.table if routed.pinned_ids is None else routed.pinned_ids.to(torch.int64)
    unrouted = ~routed.is_routed
    if due is not None:
        want = torch.where(unrouted[:, None], -1, due)
        ledger.moved(Stage.ROUTE, "topk_ids", routed.rows, got=ids.to(torch.int64), want=want)
        return (ids == want).all(dim=1)
    kept_out = ids[unrouted].to(torch.int64)
    ledger.moved(
        Stage.ROUTE,
        "topk_ids",
        routed.rows[unrouted],
        got=kept_out,
        want=torch.full_like(kept_out, -1),
    )
    legal = torch.zeros(len(ids), dtype=torch.bool)
    legal[routed.is_routed] = _check_choice(routed, ids, subject, ledger)
    return legal


def _check_choice(routed: _RoutedRows, ids: Tensor, subject: Subject, ledger: Ledger) -> Tensor:
    """[routed rows] bool: the router's own choice, from the traced logits."""
    at, routing = routed.is_routed, subject.layer.routing
    logits, noise = routed.logits[at], routed.noise[at]
    routes: Routes = select_experts(logits, routed.bias, routing)
    if routes.group_scores is not None:
        in_use = groups_the_run_may_use(ids[at], routes, routing, noise, routed.bias)
        routes = select_experts(logits, routed.bias, routing, groups_in_use=in_use)
    return check_routes(
        ledger, routed.rows[at], ids=ids[at], want=routes, noise=noise, bias=routed.bias
    )


def _check_weights(routed: _RoutedRows, subject: Subject, ledger: Ledger) -> None:
    """Weights of the experts the run chose, well or not; pinned ones are moved."""
    layer = subject.layer
    got = subject.tensor_of(routed.ranks, Stage.ROUTE, "topk_weights")
    ids = subject.tensor_of(routed.ranks, Stage.ROUTE, "topk_ids").to(torch.int64)
    if routed.table is not None and routed.pinned_ids is None:
        ids = routed.table  # padding rows keep their weights
    known = torch.where((ids >= 0) & (ids < layer.num_experts), ids, -1)
    if routed.pinned_weights is not None:
        want = routed.pinned_weights.masked_fill(known < 0, 0.0)
        ledger.moved(Stage.ROUTE, "topk_weights", routed.rows, got=got, want=want)
        return
    weights = route_weights(routed.scores, known, layer.routing)
    total = torch.ones_like(weights[:, :1])
    if layer.routing.renormalize or layer.routing.hashed:
        total = routed.scores.gather(1, known.clamp(min=0)).masked_fill(known < 0, 0.0)
        total = total.sum(dim=1, keepdim=True).clamp_min(SMALLEST_SCORE)
    relative = weight_noise(layer.routing, routed.noise, known, layer.arithmetic)
    check_kept(
        ledger,
        Stage.ROUTE,
        "topk_weights",
        routed.rows,
        got=got.to(torch.float64),
        want=weights,
        band=(relative * weights.abs() + 2 * SMALLEST_SCORE / total).masked_fill(known < 0, 0.0),
    )

"""Sums over a token's routes: weights applied twice, never or of another slot; routes lost."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.diagnosis.sums import TermSum, law_of_rank
from reports.verdict.rows import take_rows


def weighted_wrongly(case: Case) -> Iterator[Explanation]:
    """One law for all routes: top-k weights, or the scaling factor, to another power."""
    found = routes_of(case.whole)
    if found is None:
        return
    routes, weights, factor = found
    safe = torch.where(weights == 0, 1.0, weights)
    first, mistake = weights[:1].expand_as(weights), Mistake.TOPK_WEIGHTS
    laws: list[tuple[Mistake, str, Tensor | float]] = [
        (mistake, "top-k weights applied twice", weights),
        (mistake, "top-k weights not applied", 1 / safe),
        (mistake, "every route weighted as slot 0", first / safe),
        (mistake, "every route weighted as the next slot", weights.roll(-1, 0) / safe),
        (mistake, "every route weighted as the slot before", weights.roll(1, 0) / safe),
        (mistake, "top-k weights divided by their sum", 1 / _sum_of(weights)),
    ]
    if factor not in (0.0, 1.0):
        laws += [
            (Mistake.SCALING_FACTOR, "routed_scaling_factor applied twice", factor),
            (Mistake.SCALING_FACTOR, "routed_scaling_factor not applied", 1 / factor),
            (Mistake.SCALING_FACTOR, "routed_scaling_factor applied as its inverse", factor**-2),
        ]
    for kind, words, times in laws:
        coefficients = torch.as_tensor(times, dtype=torch.float64).expand_as(routes.due)
        explains = law_of_rank(case, routes, coefficients * routes.due)
        yield Explanation(
            mistake=kind,
            words=words + _seen(case, routes, coefficients),
            explains=explains,
            cost=bits_of_choice(len(laws)),
            evidence=routes.bits_of(coefficients * routes.due, explains),
        )


def routes_lost(case: Case) -> Iterator[Explanation]:
    """Single routes that are not in the sum, or twice: by fitted coefficients."""
    found = routes_of(case)
    if found is None or len(found[0].names) < 2:
        return
    routes = found[0]
    yield from _never_written(case, routes)
    counted = routes.fitted().round().clamp(0, 2).nan_to_num(1.0)
    explains = routes.explains(counted)
    if not bool(explains.any()):
        return
    said = [
        f"{_counted(counted[:, at])} of {name_of(case.rows, at)}"
        for at in explains.nonzero()[:, 0].tolist()
    ]
    yield Explanation(
        mistake=Mistake.ROUTES_LOST,
        words=f"routes in the sum: {listed(said)}",
        explains=explains,
        cost=bits_of_choice(2 * len(routes.names), int((counted != 1)[:, explains].sum())),
        evidence=routes.bits_of(counted, explains),
    )


def _counted(counts: Tensor) -> str:
    """Which slots are missing, and which are added twice."""
    wrong = (counts != 1).nonzero()[:, 0].tolist()
    return " and ".join(
        f"slot {slot} {'missing' if counts[slot] == 0 else 'twice'}" for slot in wrong
    )


def _never_written(case: Case, routes: TermSum) -> Iterator[Explanation]:
    """A sum of finite terms that is no number has read a place where no route was put."""
    unwritten = case.got.isnan().all(1) & routes.terms.isfinite().all(2).all(0)
    names = [name_of(case.rows, at) for at in unwritten.nonzero()[:, 0].tolist()]
    yield Explanation(
        mistake=Mistake.ROUTES_LOST,
        words=f"a route lost: all routes of {listed(names)} are numbers and their sum is none, so "
        "the place of one was never written",
        explains=unwritten,
    )


def _seen(case: Case, routes: TermSum, coefficients: Tensor) -> str:
    """One route with the coefficient that was fitted and the one that the law has."""
    fitted = routes.fitted()
    live = (~routes.is_zero & fitted.isfinite())[:, : len(case.here)].nonzero()
    if not len(live):
        return ""
    slot, at = live[0].tolist()
    named = name_of(case.rows, at)
    named += "" if int(case.rows.slot[at]) >= 0 else f" {routes.names[slot]}"
    return (
        f": {named} has {float(fitted[slot, at]):.4g} times its due weight, "
        f"the law says {float(coefficients[slot, at]):.4g}"
    )


def _sum_of(weights: Tensor) -> Tensor:
    """[1, W] the weights of all routes; 1 where there are none."""
    total = weights.sum(0, keepdim=True)
    return torch.where(total == 0, 1.0, total)


def routes_of(case: Case) -> tuple[TermSum, Tensor, float] | None:
    """(weighted routes of the wrong rows, their weights [n, W], a factor that is among them)."""
    if case.stage is Stage.COMBINE and case.tensor == "routed":
        held = case.subject.stage(Stage.POST_PERMUTE, case.rank)
        return _of_combine(case) if "pending_weights" in held else None
    if case.stage is not Stage.POST_PERMUTE or case.tensor != "partial" or case.check_is_move:
        return None
    if "restore.output_index" in case.subject.stage(Stage.PRE_PERMUTE, case.rank):
        return _of_received_tokens(case)
    return _of_single_routes(case)


def _of_received_tokens(case: Case) -> tuple[TermSum, Tensor, float]:
    """Received row by received row, the outputs that the way back names."""
    restore = case.subject.stage(Stage.PRE_PERMUTE, case.rank)
    outputs = case.subject.grouped(Stage.GEMM2, case.rank, "output")
    index = restore["restore.output_index"][case.within].to(torch.int64)
    is_route = (restore["restore.topk_ids"][case.within] >= 0) & (index >= 0)
    is_route &= index < len(outputs)
    weights = restore["restore.topk_weights"][case.within].to(torch.float64) * is_route
    rows = take_rows(outputs, index.clamp(0, len(outputs) - 1).flatten()).to(torch.float64)
    rows = rows.view(*index.shape, rows.shape[-1]).nan_to_num() * is_route[..., None]
    factor = case.layer.routed_scaling_factor if case.subject.view.folds_factor else 1.0
    terms = (factor * weights[..., None] * rows).transpose(0, 1)
    return _sum(case, terms), weights.T, factor


def _of_single_routes(case: Case) -> tuple[TermSum, Tensor, float]:
    """One route a row: what is due is the only term; its neighbours' weights are not in it."""
    ids = case.subject.of_tokens(Stage.ROUTE, "topk_weights").to(torch.float64)
    weights = ids[case.rows.token, case.rows.slot][None]
    return _sum(case, case.want[None]), weights, 1.0


def _of_combine(case: Case) -> tuple[TermSum, Tensor, float]:
    """What every route gave back, with the weights that were pending, by slot."""
    subject, layer = case.subject, case.layer
    start = subject.layer_starts[case.rank]
    number = torch.full((len(subject.layer_rows),), -1)
    number[start + case.within] = torch.arange(len(case.within))
    pending = subject.stage(Stage.POST_PERMUTE, case.rank)["pending_weights"]
    weights = pending[case.within].to(torch.float64)
    terms = torch.zeros(layer.top_k, *case.got.shape, dtype=torch.float64)
    for rank in subject.ranks:
        placed = subject.placed[rank]
        at = number[subject.received_from[rank][placed.received]]
        mine = at >= 0
        rows = subject.grouped(Stage.POST_PERMUTE, rank, "partial")
        outputs = take_rows(rows, placed.row[mine])[:, : case.got.shape[1]].to(torch.float64)
        at, slot = at[mine], placed.rows.slot[mine]
        terms.index_put_((slot, at), weights[at, slot][:, None] * outputs, accumulate=True)
    return _sum(case, terms), weights.T, 1.0


def _sum(case: Case, terms: Tensor) -> TermSum:
    return TermSum(
        names=[f"slot {slot}" for slot in range(len(terms))],
        terms=terms,
        due=torch.ones(terms.shape[:2], dtype=torch.float64),
        got=case.got,
    )

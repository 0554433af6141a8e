"""Experts chosen by another rule, or from among others, than the router's."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import GoldenRouting, router_scores, select_experts
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice

Law = tuple[str, Tensor]


def chosen_wrongly(case: Case) -> Iterator[Explanation]:
    """Each rule, on the traced logits of the wrong rows."""
    if (case.stage, case.tensor) != (Stage.ROUTE, "topk_ids") or case.layer.routing.hashed:
        return
    whole = case.whole
    places = _layer_rows(whole)
    if places is None:
        return
    logits = case.subject.stage(Stage.ROUTE, case.rank)["logits"][places].to(torch.float64)
    bias = case.scene.weights.router(case.rank)[1]
    laws = list(_laws(logits, bias, case.layer.routing))
    has_routes = (whole.want >= 0).any(1)
    own = select_experts(logits, bias, case.layer.routing).ids
    if case.subject.batch.topk_ids is not None:
        yield Explanation(
            mistake=Mistake.EXPERT_CHOICE,
            words="experts of the router's own choice, where the scenario pins others: either may "
            "be meant",
            explains=case.lawful((whole.got == own.to(torch.float64)).all(1)),
            is_guess=True,
        )
    for words, ids in laws:
        is_told = (ids != own).any(1)  # from the rule itself, which pinned routes need not follow
        follows = (whole.got == ids.to(torch.float64)).all(1) & is_told
        explains = case.lawful(follows | ~has_routes)
        yield Explanation(
            mistake=Mistake.EXPERT_CHOICE,
            words=f"{words}{_seen(case, explains)}",
            explains=explains,
            cost=bits_of_choice(len(laws)),
        )


def masked_rows(case: Case) -> Iterator[Explanation]:
    """Rows whose every route is dropped, where none should be; or routed, where none should be."""
    if (case.stage, case.tensor) != (Stage.ROUTE, "topk_ids"):
        return
    masked = (case.got == -1).all(1) & (case.want >= 0).any(1)
    places = case.within[masked].tolist()
    yield Explanation(
        mistake=Mistake.ROUTES_LOST,
        words=f"rows masked that hold tokens: {_runs(places)} of the rank",
        explains=masked,
    )
    padding = (case.rows.token < 0) & (case.want == -1).all(1) & (case.got >= 0).any(1)
    yield Explanation(
        mistake=Mistake.PADDING_LEAK,
        words=f"padding rows routed as if they were tokens: {int(padding.sum())} rows",
        explains=padding,
        is_guess=True,
    )


def _runs(places: list[int]) -> str:
    """Ascending row numbers, those that follow one another as one."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    said = listed([f"{first}..{last}" if last > first else str(first) for first, last in runs])
    return f"{len(places)} rows, {said}"


def _layer_rows(case: Case) -> Tensor | None:
    """[W] rows of the rank's layer rows: padding that keeps out of routing was not compared."""
    held = case.subject.layer_rows.rank == case.rank
    is_routed = ~case.subject.is_masked[held]
    routed = is_routed.nonzero()[:, 0]
    return routed[case.within] if len(routed) == case.num_compared else None


def _laws(logits: Tensor, bias: Tensor | None, rule: GoldenRouting) -> Iterator[Law]:
    """Other rules of choice, each with the ids it gives."""
    if rule.n_group > 1:
        everything = replace(rule, topk_group=rule.n_group)
        yield "groups of experts ignored", select_experts(logits, bias, everything).ids
        if bias is not None:
            yield "groups ranked by their best expert alone", _by_best(logits, bias, rule)
    if bias is not None:
        unbiased = select_experts(logits, None, replace(rule, n_group=1, topk_group=1)).ids
        yield "experts chosen without the correction bias", unbiased
    due = select_experts(logits, bias, rule)
    if rule.n_group > 1 and bias is not None:
        outside = due.ranked.masked_fill(due.ranked == -torch.inf, 0.0)
        first = outside.sort(dim=1, descending=True, stable=True).indices[:, : rule.top_k]
        yield "experts outside the chosen groups ranked 0, not last", _with_rest(first, due.ids)
    last = logits.shape[1] - 1
    behind = last - due.ranked.flip(1).sort(dim=1, descending=True, stable=True).indices
    yield "ties given to the highest expert", _with_rest(behind[:, : rule.top_k], due.ids)
    loses = due.ranked.gather(1, due.ids[:, : rule.top_k]) < 0
    to_zero = due.ids[:, : rule.top_k].masked_fill(loses, 0)
    yield "experts ranked below 0 lost to expert 0", _with_rest(to_zero, due.ids)


def _by_best(logits: Tensor, bias: Tensor, rule: GoldenRouting) -> Tensor:
    """Ids from the groups whose best expert ranks highest."""
    ranked = router_scores(logits, rule) + bias
    best = torch.unflatten(ranked, 1, (rule.n_group, -1)).amax(2)
    place = best.sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
    in_use = place < rule.topk_group
    return select_experts(logits, bias, rule, groups_in_use=in_use).ids


def _with_rest(ids: Tensor, due: Tensor) -> Tensor:
    """The routed slots by a rule, fused shared slots as they are due."""
    return torch.cat([ids, due[:, ids.shape[1] :]], dim=1)


def _seen(case: Case, explains: Tensor) -> str:
    if not bool(explains.any()):
        return ""
    at = int(explains.nonzero()[0])
    slot = int(case.wrong[at].nonzero()[0])
    return (
        f": {name_of(case.rows, at)} slot {slot} goes to expert {int(case.got[at, slot])}, "
        f"due {int(case.want[at, slot])}"
    )

"""Top-k weights by another rule, as the router made them or as they travel."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import GoldenRouting, round_bf16, route_weights, router_scores, select_experts
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice


def weights_wrong(case: Case) -> Iterator[Explanation]:
    """Each law, on the whole rows of weights that are wrong."""
    if case.tensor.removeprefix("restore.") not in ("topk_weights", "pending_weights"):
        return
    if case.want.shape[1] != case.layer.top_k:
        return
    whole = case.whole
    laws = [*_powers(whole), *_slots(whole)]
    if case.stage is Stage.ROUTE and not case.check_is_move:
        laws += _rules(whole)
    for mistake, words, value in laws:
        fits, is_other = _fits(whole, value)
        explains = case.lawful(fits) & is_other[: len(case.here)]
        yield Explanation(
            mistake=mistake,
            words=words + _seen(case, value, explains),
            explains=explains,
            cost=bits_of_choice(len(laws)),
        )


Law = tuple[Mistake, str, Tensor]


def _powers(case: Case) -> Iterator[Law]:
    """Weights, or the scaling factor in them, to another power."""
    yield Mistake.TOPK_WEIGHTS, "top-k weights applied twice", _fp32(case.want * case.want)
    ones = torch.where(case.want == 0, 0.0, 1.0).to(torch.float64)
    yield Mistake.TOPK_WEIGHTS, "top-k weights not applied", ones
    yield Mistake.TOPK_WEIGHTS, "top-k weights rounded to bf16", round_bf16(case.want)
    yield Mistake.ROUTES_LOST, "weights of routes lost", torch.zeros_like(case.want)
    factor = case.layer.routed_scaling_factor
    if factor not in (0.0, 1.0):
        of_factor = Mistake.SCALING_FACTOR
        yield of_factor, "routed_scaling_factor applied to the weights", case.want * factor
        yield of_factor, "routed_scaling_factor divided out of the weights", case.want / factor


def _slots(case: Case) -> Iterator[Law]:
    """Weights from other slots."""
    kind = Mistake.TOPK_WEIGHTS
    yield kind, "every slot has the weight of slot 0", case.want[:, :1].expand_as(case.want)
    yield kind, "every slot has the weight of the next one", case.want.roll(-1, 1)
    yield kind, "every slot has the weight of the one before", case.want.roll(1, 1)


def _rules(case: Case) -> Iterator[Law]:
    """Weights of the chosen experts by another rule, from the traced logits."""
    layer, subject, kind = case.layer, case.subject, Mistake.TOPK_WEIGHTS
    traced = subject.stage(Stage.ROUTE, case.rank)
    logits = traced["logits"][case.within].to(torch.float64)
    ids = traced["topk_ids"][case.within].to(torch.int64)
    known = torch.where((ids >= 0) & (ids < logits.shape[1]), ids, -1)
    rule, scores = layer.routing, router_scores(logits, layer.routing)
    bias = case.scene.weights.router(case.rank)[1]
    yield from _of_other_experts(scores, logits, bias, known, rule)
    if not rule.hashed:
        other = replace(rule, renormalize=not rule.renormalize)
        how = "not divided by their sum" if rule.renormalize else "divided by their sum"
        yield kind, f"top-k weights {how}", route_weights(scores, known, other)
    chosen = logits.gather(1, known.clamp(min=0)).masked_fill(known < 0, -torch.inf)
    yield kind, "softmax over the chosen logits alone", chosen.softmax(1).nan_to_num()
    if bias is not None:
        yield kind, "weights taken from score + bias", route_weights(scores + bias, known, rule)


def _of_other_experts(
    scores: Tensor, logits: Tensor, bias: Tensor | None, known: Tensor, rule: GoldenRouting
) -> Iterator[Law]:
    """Weights that belong to the experts due where others were chosen, or the reverse."""
    kind = Mistake.EXPERT_CHOICE
    if rule.hashed:
        yield (
            kind,
            "weights of the chosen experts, not of those due",
            route_weights(scores, known, rule),
        )
        return
    due = select_experts(logits, bias, rule).ids
    yield kind, "weights of the experts due, not of those chosen", route_weights(scores, due, rule)


def _fp32(values: Tensor) -> Tensor:
    return values.to(torch.float32).to(torch.float64)


def _fits(case: Case, value: Tensor) -> tuple[Tensor, Tensor]:
    """[W] bool: a law's weights within the relative band of the due ones, or one fp32 rounding.

    And whether they are others than the due ones, by more than that.
    """
    rounding = torch.finfo(torch.float32).eps
    relative = (case.band / case.want.abs()).nan_to_num(0.0, 0.0, 0.0).amax(1, keepdim=True)
    band = value.abs() * relative.clamp(min=rounding)
    is_near = (case.got - value).abs() <= band
    return is_near.all(1), ((case.got - case.want).abs() > band).any(1)


def _seen(case: Case, value: Tensor, explains: Tensor) -> str:
    """The first explained row's first wrong slot."""
    if not bool(explains.any()):
        return ""
    at = int(explains.nonzero()[0])
    slot = int(case.wrong[at].nonzero()[0])
    return (
        f": {name_of(case.rows, at)} slot {slot} has {float(case.got[at, slot]):.4g}, "
        f"due {float(case.want[at, slot]):.4g}, so by that rule {float(value[at, slot]):.4g}"
    )

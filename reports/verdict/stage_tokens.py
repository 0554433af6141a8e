"""Own errors of the stages that work on a rank's own tokens: glue, route, combine, tail."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import route_weights, router_scores, select_experts, tail
from reports.verdict.band import (
    SMALLEST_SCORE,
    fp32_noise,
    gemm_noise,
    score_noise,
    stored_bf16,
    weight_noise,
)
from reports.verdict.decode import dequantized
from reports.verdict.ledger import Ledger
from reports.verdict.rules import check_routes
from reports.verdict.stage_checks import BAND, StageChecks, product
from reports.verdict.stage_weights import JudgedWeights
from reports.verdict.subject import Subject


def check_glue_in(subject: Subject, ledger: Ledger) -> None:
    """The rows that enter are the rows that were dealt."""
    got = subject.token_tensor(Stage.GLUE_IN, "hidden_states")
    ledger.moved(
        Stage.GLUE_IN, "hidden_states", subject.token_rows, got=got, want=subject.hidden_states
    )


def check_glue_out(subject: Subject, ledger: Ledger) -> None:
    """The rows that leave are the tail's."""
    got = subject.token_tensor(Stage.GLUE_OUT, "hidden_states")
    want = subject.token_tensor(Stage.TAIL, "output")
    ledger.moved(Stage.GLUE_OUT, "hidden_states", subject.token_rows, got=got, want=want)


def check_route(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> Tensor:
    """Logits by the band, chosen experts by the router's rule, weights by the band.

    Returns:
        [T] bool: tokens whose chosen experts are legal.
    """
    legal = torch.zeros(subject.hidden_states.shape[0], dtype=torch.bool)
    for ranks in weights.ranks_with_equal_router():
        tokens = torch.cat([subject.own_tokens(rank) for rank in ranks])
        legal[tokens] = _check_route_of(ranks, subject, weights, ledger)
    return legal


def _check_route_of(
    ranks: Sequence[int], subject: Subject, weights: JudgedWeights, ledger: Ledger
) -> Tensor:
    """The routes of some ranks' tokens, all through the same router: [T of them] bool."""
    layer, rows = subject.layer, subject.rows_of(ranks)
    x = subject.tensor_of(ranks, Stage.GLUE_IN, "hidden_states").to(torch.float64)
    gate, bias = weights.router(ranks[0])
    want = product(x, gate)
    unscaled = replace(layer.arithmetic, scaled_block=None)  # the gate's operands have no scales
    noise = gemm_noise(want.magnitude, x.shape[1], unscaled)
    logits = subject.tensor_of(ranks, Stage.ROUTE, "logits").to(torch.float64)
    band = noise + fp32_noise(want.value.abs(), 1)
    ledger.cells(BAND, Stage.ROUTE, "logits", rows, got=logits, want=want.value, band=band)
    routes = select_experts(logits, bias, layer.top_k, layer.renormalize)
    ids = subject.tensor_of(ranks, Stage.ROUTE, "topk_ids")
    got = subject.tensor_of(ranks, Stage.ROUTE, "topk_weights").to(torch.float64)
    want_weights, scale = _weights_at(ids, logits, layer.renormalize)
    relative = weight_noise(layer.arithmetic, layer.top_k, layer.renormalize)
    band = relative * want_weights.abs() + 2 * SMALLEST_SCORE / scale
    ledger.cells(BAND, Stage.ROUTE, "topk_weights", rows, got=got, want=want_weights, band=band)
    noise_of_score = score_noise(layer.arithmetic)
    return check_routes(ledger, rows, ids=ids, want=routes, noise=noise_of_score, bias=bias)


def _weights_at(topk_ids: Tensor, logits: Tensor, renormalize: bool) -> tuple[Tensor, Tensor]:
    """[T, K] weights of the experts the run chose, well or not, and [T, 1] what scores are over."""
    chosen = topk_ids.to(torch.int64)
    known = torch.where((chosen >= 0) & (chosen < logits.shape[1]), chosen, -1)
    scores = router_scores(logits)
    weights = route_weights(scores, known, renormalize)
    if not renormalize:
        return weights, torch.ones_like(weights[:, :1])
    total = route_weights(scores, known, renormalize=False).sum(dim=1, keepdim=True)
    return weights, total.clamp_min(SMALLEST_SCORE)


def check_combine(subject: Subject, ledger: Ledger) -> None:
    """Each token's partials of all ranks, added in fp32 and rounded once."""
    partials, magnitude, count = _partials_at_home(subject)
    noise = fp32_noise(magnitude, int(count.max()) if count.numel() else 0)
    got = subject.token_tensor(Stage.COMBINE, "routed").to(torch.float64)
    ledger.cells(
        BAND,
        Stage.COMBINE,
        "routed",
        subject.token_rows,
        got=got,
        want=partials,
        band=stored_bf16(partials, noise),
    )


def _partials_at_home(subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H] sum of the traced partials, [T, H] sum of their magnitudes, [T] how many."""
    shape = subject.hidden_states.shape
    value = torch.zeros(shape, dtype=torch.float64)
    magnitude = torch.zeros(shape, dtype=torch.float64)
    count = torch.zeros(shape[0], dtype=torch.int64)
    for rank in subject.ranks:
        tokens = subject.received_tokens[rank]
        partial = subject.stage(Stage.POST_PERMUTE, rank)["partial"].to(torch.float64)
        value.index_add_(0, tokens, partial)
        magnitude.index_add_(0, tokens, partial.abs())
        count += torch.bincount(tokens, minlength=shape[0])
    return value, magnitude, count


def check_tail(subject: Subject, weights: JudgedWeights, ledger: Ledger) -> None:
    """The shared expert step by step, then its sum with the scaled routed branch."""
    layer, rows = subject.layer, subject.token_rows
    routed = subject.token_tensor(Stage.COMBINE, "routed").to(torch.float64)
    shared = None
    if weights.golden.shared() is not None:
        for ranks in weights.ranks_with_equal_shared():
            _check_shared_expert(ranks, subject, weights, ledger)
        shared = subject.token_tensor(Stage.TAIL, "shared.output").to(torch.float64)
    want = tail(routed, shared, layer.routed_scaling_factor)
    noise = fp32_noise(want.magnitude, 3)  # the scaling factor itself, the product, the addition
    got = subject.token_tensor(Stage.TAIL, "output").to(torch.float64)
    band = stored_bf16(want.value, noise)
    ledger.cells(BAND, Stage.TAIL, "output", rows, got=got, want=want.value, band=band)


def _check_shared_expert(
    ranks: Sequence[int], subject: Subject, weights: JudgedWeights, ledger: Ledger
) -> None:
    """The dense path of some ranks' tokens, all through the same weights."""
    pair = weights.shared(ranks[0])
    assert pair is not None

    def traced(stage: Stage, name: str) -> Tensor:
        return subject.tensor_of(ranks, stage, name)

    def scale_of(name: str) -> Tensor | None:
        scale = f"{name}_scale"
        return traced(Stage.TAIL, scale) if scale in subject.stage(Stage.TAIL, ranks[0]) else None

    rows = subject.rows_of(ranks)
    steps = StageChecks(ledger, Stage.TAIL, subject.layer, rows)
    source = traced(Stage.GLUE_IN, "hidden_states")
    activation = traced(Stage.TAIL, "shared.activation")
    for name, before, weight, after in (
        ("shared.input", source, pair[0], "shared.gate_up"),
        ("shared.hidden_states", activation, pair[1], "shared.output"),
    ):
        values, scale = traced(Stage.TAIL, name), scale_of(name)
        steps.quantised(name, values, scale, before)
        gemm_in = dequantized(values, scale)
        got = traced(Stage.TAIL, after)
        steps.gemm(after, got, product(gemm_in, weight), gemm_in.shape[1])
    steps.activation("shared.activation", activation, traced(Stage.TAIL, "shared.gate_up"))

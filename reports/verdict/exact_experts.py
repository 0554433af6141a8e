"""Exact mode up to the experts' outputs: what is compared with the certified values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.deviation import NotAsked
from reports.verdict.exact_compared import (
    Compared,
    Shards,
    by_shard,
    of_rows,
    of_tokens,
)
from reports.verdict.exact_rows import Certain
from reports.verdict.route_values import RouteValues
from reports.verdict.rows import take_rows
from reports.verdict.subject import Subject
from topology.sync import PADDING


def of_inputs(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared]:
    """The tokens that the layer works on."""
    tokens = (stages.tokens.value, stages.tokens.is_certain)
    yield of_tokens(subject, Stage.GLUE_IN, "hidden_states", subject.layer_rows, *tokens)


def of_weights(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared]:
    """Top-k weights, where these are pinned."""
    if subject.batch.topk_weights is None:
        return
    weights = subject.batch.topk_weights.to(torch.float64)
    kept = weights.masked_fill(stages.topk_ids < 0, 0.0)
    known = (kept, torch.ones_like(kept).bool())
    yield of_tokens(subject, Stage.ROUTE, "topk_weights", subject.layer_rows, *known)


def of_wire(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared | NotAsked]:
    """Received rows, as dispatch hands them over."""
    for rank in subject.ranks:
        rows = subject.received_rows(rank)
        at = (rows.token != PADDING).nonzero()[:, 0]
        traced = subject.grouped(Stage.DISPATCH, rank, "hidden_states")
        scale = None
        if "hidden_states_scale" in subject.stage(Stage.DISPATCH, rank):
            scale = subject.grouped(Stage.DISPATCH, rank, "hidden_states_scale")
        yield from of_rows(
            Stage.DISPATCH,
            "hidden_states",
            rows[at],
            (take_rows(traced, at), None if scale is None else take_rows(scale, at)),
            stages.wire[rows.token[at]],
        )


class _Routes:
    """Rows of routes that some ranks computed, and the part of each expert's columns they hold."""

    def __init__(self, subject: Subject, part: RouteValues) -> None:
        self._part = part
        self._real = (part.rows.token != PADDING).nonzero()[:, 0]
        self.rows = part.rows[self._real]
        self.route = self.rows.token * subject.layer.top_k + self.rows.slot
        shards = [subject.layer.expert_shard(rank).index for rank in subject.ranks]
        self.shard = torch.tensor(shards)[self.rows.rank]
        self.cut = Shards(subject.layer.layout.moe_tp, self.shard)

    def traced(self, stage: Stage, name: str) -> tuple[Tensor, Tensor | None]:
        """([N, C] of a tensor, its scales), as traced."""
        scale = self._part.scale(stage, f"{name}_scale")
        values = take_rows(self._part.tensor(stage, name), self._real)
        return values, None if scale is None else take_rows(scale, self._real)

    def stored(self, stage: Stage, name: str, want: Certain, halves: int = 1) -> Compared:
        """A tensor of bf16 values beside certain ones of whole rows, [T * K, C]."""
        return Compared(
            stage=stage,
            tensor=name,
            rows=self.rows,
            got=self.traced(stage, name)[0].to(torch.float64),
            want=self.cut.of(want.value[self.route], halves),
            is_certain=self.cut.of(want.is_certain[self.route], halves),
        )


def _in_parts(subject: Subject) -> Iterator[_Routes]:
    """All routes, in parts that can be compared one after the other."""
    return (_Routes(subject, part) for part in subject.route_parts)


def of_grouped(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared | NotAsked]:
    """What GEMM1 reads."""
    stage, name = Stage.PRE_PERMUTE, "rows.hidden_states"
    for routes in _in_parts(subject):
        want = stages.grouped[routes.rows.token]
        yield from of_rows(stage, name, routes.rows, routes.traced(stage, name), want)


def of_gate_up(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared]:
    """What GEMM1 stores."""
    for routes in _in_parts(subject):
        yield routes.stored(Stage.GEMM1, "gate_up", stages.routes.gate_up, 2)


def of_activation(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared | NotAsked]:
    """What the activation stores, and what GEMM2 reads."""
    stage, name, stored = Stage.ACTIVATION, "hidden_states", stages.routes.stored
    if stored is not None:
        for routes in _in_parts(subject):
            yield routes.stored(stage, "activation", stored)
    for routes in _in_parts(subject):
        want = routes.cut.of_quantised(stages.routes.middle[routes.route])
        yield from of_rows(stage, name, routes.rows, routes.traced(stage, name), want)


def of_products(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared]:
    """What GEMM2 stores: of each shard a row of its own."""
    outputs = stages.routes.outputs
    for routes in _in_parts(subject):
        yield Compared(
            stage=Stage.GEMM2,
            tensor="output",
            rows=routes.rows,
            got=routes.traced(Stage.GEMM2, "output")[0].to(torch.float64),
            want=by_shard(outputs, routes.route, routes.shard, "value"),
            is_certain=by_shard(outputs, routes.route, routes.shard, "is_certain"),
        )

"""Exact mode up to the experts' outputs: what is compared with the certified values."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.exact_compared import (
    Compared,
    Shards,
    by_shard,
    of_rows,
    of_tokens,
)
from reports.verdict.rows import take_rows
from reports.verdict.subject import Subject
from topology.sync import PADDING


def of_inputs(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared]:
    """The tokens that the layer works on, and their pinned weights."""
    rows = subject.layer_rows
    yield of_tokens(
        subject, Stage.GLUE_IN, "hidden_states", rows, stages.tokens.value, stages.tokens.is_certain
    )
    if subject.batch.topk_weights is not None:
        weights = subject.batch.topk_weights.to(torch.float64)
        kept = weights.masked_fill(stages.topk_ids < 0, 0.0)
        yield of_tokens(
            subject, Stage.ROUTE, "topk_weights", rows, kept, torch.ones_like(kept).bool()
        )


def of_wire(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared]:
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


def of_experts(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared]:
    """Grouped rows of every route, and what the experts make of them."""
    real = (subject.route_rows.token != PADDING).nonzero()[:, 0]
    rows = subject.route_rows[real]
    route = rows.token * subject.layer.top_k + rows.slot
    shard = torch.tensor([subject.layer.expert_shard(r).index for r in subject.ranks])[rows.rank]
    routes = stages.routes

    def traced(stage: Stage, name: str) -> tuple[Tensor, Tensor | None]:
        scale = subject.route_scale(stage, f"{name}_scale")
        values = take_rows(subject.route_tensor(stage, name), real)
        return values, None if scale is None else take_rows(scale, real)

    yield from of_rows(
        Stage.PRE_PERMUTE,
        "rows.hidden_states",
        rows,
        traced(Stage.PRE_PERMUTE, "rows.hidden_states"),
        stages.grouped[rows.token],
    )
    cut = Shards(subject.layer.layout.moe_tp, shard)
    for stage, name, want, halves in (
        (Stage.GEMM1, "gate_up", routes.gate_up, 2),
        (Stage.ACTIVATION, "activation", routes.stored, 1),
    ):
        if want is not None:
            yield Compared(
                stage=stage,
                tensor=name,
                rows=rows,
                got=traced(stage, name)[0].to(torch.float64),
                want=cut.of(want.value[route], halves),
                is_certain=cut.of(want.is_certain[route], halves),
            )
    yield from of_rows(
        Stage.ACTIVATION,
        "hidden_states",
        rows,
        traced(Stage.ACTIVATION, "hidden_states"),
        cut.of_quantised(routes.middle[route]),
    )
    yield Compared(
        stage=Stage.GEMM2,
        tensor="output",
        rows=rows,
        got=traced(Stage.GEMM2, "output")[0].to(torch.float64),
        want=by_shard(routes.outputs, route, shard, "value"),
        is_certain=by_shard(routes.outputs, route, shard, "is_certain"),
    )

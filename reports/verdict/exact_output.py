"""Exact mode behind the experts: stored sums of routes, the shared expert, the output."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from moe.golden import PartialStores, round_bf16
from reports.verdict.certified_layer import CertifiedLayer
from reports.verdict.certified_sums import CertifiedSums
from reports.verdict.deviation import NotAsked
from reports.verdict.exact_compared import Compared, Shards, by_shard, of_rows, of_tokens
from reports.verdict.exact_rows import Certain
from reports.verdict.rows import Rows, take_rows
from reports.verdict.subject import Subject
from topology.sync import PADDING, Reducer


def of_partials(
    subject: Subject, stages: CertifiedLayer, sums: CertifiedSums
) -> Iterator[Compared]:
    """Stage post_permute: a row for each route, or a sum for each received token."""
    match subject.view.partials:
        case PartialStores.RANK:
            parts = (_rank_sums(subject, sums, rank) for rank in subject.ranks)
        case PartialStores.ROUTE:
            parts = (_routes(subject, sums.weighted, rank) for rank in subject.ranks)
        case PartialStores.NOTHING:
            outputs = partial(_of_shard, stages.routes.outputs)
            parts = (_routes(subject, outputs, rank) for rank in subject.ranks)
    for rank, (rows, received, want) in zip(subject.ranks, parts, strict=True):
        traced = subject.grouped(Stage.POST_PERMUTE, rank, "partial")
        yield Compared(
            stage=Stage.POST_PERMUTE,
            tensor="partial",
            rows=rows,
            got=take_rows(traced, received).to(torch.float64),
            want=want.value,
            is_certain=want.is_certain,
        )


def _routes(
    subject: Subject, of_shard: Callable[[int, Tensor], Certain], rank: int
) -> tuple[Rows, Tensor, Certain]:
    """(coordinates, row of the partial, value stored) of every route of a rank."""
    placed = subject.placed[rank]
    real = (placed.rows.token != PADDING).nonzero()[:, 0]
    rows = placed.rows[real]
    route = rows.token * subject.layer.top_k + rows.slot
    found = of_shard(subject.layer.expert_shard(rank).index, route)
    return rows, placed.received[real], Certain(round_bf16(found.value), found.is_certain)


def _of_shard(shards: tuple[Certain, ...], shard: int, routes: Tensor) -> Certain:
    value = shards[shard].value[routes].to(torch.float64)
    return Certain(value, shards[shard].is_certain[routes])


def _rank_sums(subject: Subject, sums: CertifiedSums, rank: int) -> tuple[Rows, Tensor, Certain]:
    """(coordinates, row of the partial, value stored) of every token that a rank received."""
    rows, placed = subject.received_rows(rank), subject.placed[rank]
    of_token = (placed.rows.token != PADDING).nonzero()[:, 0]
    routes, into = placed.rows[of_token], placed.received[of_token]
    at = routes.token * subject.layer.top_k + routes.slot
    terms = sums.weighted(subject.layer.expert_shard(rank).index, at)
    empty = torch.zeros(len(rows), terms.value.shape[1], dtype=torch.float64)
    stored = sums.stored_partial(empty.index_add(0, into, terms.value))
    doubtful = empty.index_add(0, into, (~terms.is_certain).to(torch.float64))
    real = (rows.token != PADDING).nonzero()[:, 0]
    rows = rows[real]
    width = sums.has_few_bits.shape[1]
    few = torch.nn.functional.pad(
        sums.has_few_bits[rows.token], (0, empty.shape[1] - width), value=True
    )
    certain = stored.is_certain[real] & (doubtful[real] == 0) & few
    return rows, real, Certain(stored.value[real], certain)


def of_shared(subject: Subject, stages: CertifiedLayer) -> Iterator[Compared | NotAsked]:
    """The shared expert's steps, where it is computed in the tail."""
    holders = subject.layer.ranks_with_shared_in_tail
    if stages.shared is None or not holders:
        return
    traced, mlp = stages.shared
    rows = subject.rows_of(holders)
    real = (rows.token != PADDING).nonzero()[:, 0]
    rows = rows[real]
    shard = torch.tensor([subject.layer.shared_shard(r).index for r in subject.ranks])[rows.rank]
    cut = Shards(len(mlp.outputs), shard)

    def tensors(name: str) -> tuple[Tensor, Tensor | None]:
        scale = subject.scale_of(holders, Stage.TAIL, name)
        values = take_rows(subject.tensor_of(holders, Stage.TAIL, name), real)
        return values, None if scale is None else take_rows(scale, real)

    source = tensors("shared.input")
    yield from of_rows(Stage.TAIL, "shared.input", rows, source, traced[rows.token])
    yield Compared(
        stage=Stage.TAIL,
        tensor="shared.gate_up",
        rows=rows,
        got=tensors("shared.gate_up")[0].to(torch.float64),
        want=cut.of(mlp.gate_up.value[rows.token], 2),
        is_certain=cut.of(mlp.gate_up.is_certain[rows.token], 2),
    )
    middle, name = cut.of_quantised(mlp.middle[rows.token]), "shared.hidden_states"
    yield from of_rows(Stage.TAIL, name, rows, tensors(name), middle)
    yield Compared(
        stage=Stage.TAIL,
        tensor="shared.output",
        rows=rows,
        got=tensors("shared.output")[0].to(torch.float64),
        want=by_shard(mlp.outputs, rows.token, shard, "value"),
        is_certain=by_shard(mlp.outputs, rows.token, shard, "is_certain"),
    )


def of_finished(subject: Subject, sums: CertifiedSums) -> Iterator[Compared]:
    """The finished rows, where a rank holds them whole before they return."""
    layer, output = subject.layer, (sums.output.value, sums.output.is_certain)
    is_whole = layer.sync.reducer is not Reducer.GLUE_OUT
    if is_whole and layer.shared is not SharedExpertMode.LOCAL:
        yield of_tokens(subject, Stage.TAIL, "output", subject.layer_rows, *output)


def of_output(subject: Subject, sums: CertifiedSums) -> Iterator[Compared]:
    """The finished rows as their owner gets them."""
    output = (sums.output.value, sums.output.is_certain)
    yield of_tokens(subject, Stage.GLUE_OUT, "hidden_states", subject.own_rows, *output)


def of_combined(subject: Subject, sums: CertifiedSums) -> Iterator[Compared]:
    """The sum over all routes, where combine brings it home."""
    if subject.layer.is_all_to_all:
        routed = (sums.routed.value, sums.routed.is_certain)
        yield of_tokens(subject, Stage.COMBINE, "routed", subject.layer_rows, *routed)

"""The same tokens under two topologies: where their bits part first, and where they may.

Rows are compared by token and slot, with the columns of shards side by side, as values: a code
times its scale. Sums over part of a token's routes, or over a shard, have no counterpart in
another topology; what comes of them has one again at the end.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from moe.golden import PartialStores
from reports.verdict.format_views import view_of
from reports.verdict.layer import JudgedLayer
from reports.verdict.subject import Subject
from topology.sync import PADDING, Gather, Reducer

OUTPUT: Final = (Stage.GLUE_OUT, "hidden_states")

_TOKEN_TENSORS: Final = (
    (Stage.GLUE_IN, "hidden_states"),
    (Stage.ROUTE, "logits"),
    (Stage.ROUTE, "topk_ids"),
    (Stage.ROUTE, "topk_weights"),
    (Stage.COMBINE, "routed"),
    (Stage.TAIL, "output"),
    OUTPUT,
)
_ROUTE_TENSORS: Final = (
    (Stage.PRE_PERMUTE, "rows.hidden_states"),
    (Stage.GEMM1, "gate_up"),
    (Stage.ACTIVATION, "hidden_states"),
    (Stage.GEMM2, "output"),
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NamedRows:
    """Rows of one tensor, ordered by their names.

    names   [N] int64  token, or token * K + slot
    values  [N, C]     float64, or as traced where rows belong to tokens
    ranks   [N] int64  where they were; None: not kept
    """

    names: Tensor
    values: Tensor
    ranks: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CanonicalForward:
    """What a forward computed, in coordinates that no topology enters.

    layer   its facts
    values  (stage, tensor) -> rows; only what is whole, and what was kept
    """

    layer: JudgedLayer
    values: Mapping[tuple[Stage, str], NamedRows]

    @property
    def output(self) -> Tensor:
        """[T, H] bf16."""
        return self.values[OUTPUT].values


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first stage whose values two forwards do not share, and the first such cell.

    rank   that has the cell in the second forward; None: not kept
    cells  how many cells of the tensor differ, ``of`` how many that both have
    """

    stage: Stage
    tensor: str
    token: int
    slot: int | None
    column: int
    one: float
    other: float
    cells: int
    of: int
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredParting:
    """A rounding point that one of two topologies has alone: from this stage on bits may differ."""

    stage: Stage
    reason: str


def canonical_forward(subject: Subject) -> CanonicalForward:
    """Take a forward's values out of ranks, rows and shards."""
    values = {**dict(_token_values(subject)), **dict(_route_values(subject))}
    ordered = sorted(values.items(), key=lambda item: item[0][0].position)
    return CanonicalForward(layer=subject.layer, values=dict(ordered))


def first_parting(one: CanonicalForward, other: CanonicalForward) -> Parting | None:
    """Where the values of two forwards of the same tokens part first; None: nowhere."""
    for (stage, tensor), mine in one.values.items():
        theirs = other.values.get((stage, tensor))
        parting = theirs and parting_of(stage, tensor, mine, theirs, one.layer.top_k)
        if parting:
            return parting
    return None


def declared_parting(one: JudgedLayer, other: JudgedLayer) -> DeclaredParting | None:
    """The first stage where what both declare lets bits differ; None: they have to be equal."""
    for stage, differs, reason in _rounding_points(one, other):
        if differs:
            return DeclaredParting(stage=stage, reason=reason)
    return None


def is_declared(parting: Parting, declared: DeclaredParting | None) -> bool:
    """Whether bits part where a rounding point lets them, or behind it."""
    return declared is not None and declared.stage.position <= parting.stage.position


def tokens_in_order(values: Tensor, ranks: Tensor | None = None) -> NamedRows:
    """Rows [T, C] that belong to the tokens of the list, one after the other."""
    return NamedRows(names=torch.arange(len(values)), values=values, ranks=ranks)


def _rounding_points(one: JudgedLayer, other: JudgedLayer) -> Iterator[tuple[Stage, bool, str]]:
    """(stage, whether the two differ there, why bits may differ) in the order of the pipeline."""
    both = (one, other)
    yield Stage.GLUE_IN, _differ(map(_gathers_fp8, both)), "one of them gathers rows in fp8"
    yield (
        Stage.ROUTE,
        _differ(replace(each.arithmetic, rows_stand_alone=True) for each in both),
        "their GEMM backends declare other arithmetic",
    )
    yield (
        Stage.PRE_PERMUTE,
        _differ(map(_quantisers, both)),
        "rows are quantised otherwise in front of the experts",
    )
    yield (
        Stage.GEMM1,
        not all(each.arithmetic.rows_stand_alone for each in both),
        "the GEMM backend does not promise that a row's bits are its own",
    )
    recipes = [f"{each.recipe} with scales {each.scale_format}" for each in both]
    yield (
        Stage.GEMM1,
        recipes[0] != recipes[1],
        f"expert weights are rounded otherwise: {recipes[0]} or {recipes[1]}",
    )
    layouts = [each.gemm_layout for each in both]
    yield (
        Stage.ACTIVATION,
        layouts[0] is not layouts[1],
        f"layouts {layouts[0]} and {layouts[1]} round the activation in other places",
    )
    shards = [each.layout.moe_tp for each in both]
    yield (
        Stage.GEMM2,
        shards[0] != shards[1],
        f"an expert's row is stored as bf16 by each of its shards: {shards[0]} or {shards[1]}",
    )
    ranks = [each.layout.ep for each in both]
    yield (
        Stage.POST_PERMUTE,
        _differ(map(_summed_together, both)),
        f"a token's routes are summed, and stored as bf16, rank by rank: on {ranks[0]} or "
        f"{ranks[1]} of them",
    )
    yield (
        Stage.POST_PERMUTE,
        _differ((each.dispatch_format, each.expanded, each.wide_segments) for each in both),
        "weights and the scaling factor meet other roundings behind another dispatcher",
    )
    yield (
        Stage.TAIL,
        _differ((each.shared, each.sync.reducer) for each in both),
        "the shared expert joins the sum in another place",
    )


def _differ(pair: Iterator[object]) -> bool:
    one, other = pair
    return one != other


def _gathers_fp8(layer: JudgedLayer) -> bool:
    return layer.gathers_fp8 and layer.sync.gather is Gather.ALL_GATHER_V


def _quantisers(layer: JudgedLayer) -> tuple[object, ...]:
    wire = view_of(layer).low_latency_wire
    return layer.scales_of(Stage.PRE_PERMUTE, "rows.hidden_states"), layer.requantises, wire


def _summed_together(layer: JudgedLayer) -> frozenset[frozenset[int]] | None:
    """Sets of experts whose rows of a token are summed before they are stored; None: none are."""
    if view_of(layer).partials is PartialStores.NOTHING:
        return None
    size = layer.slots_per_rank
    starts = range(0, len(layer.slot_experts), size)
    return frozenset(frozenset(layer.slot_experts[at : at + size]) for at in starts)


def _token_values(subject: Subject) -> Iterator[tuple[tuple[Stage, str], NamedRows]]:
    layer = subject.layer
    is_summed = layer.sync.reducer is not Reducer.GLUE_OUT
    whole = {
        Stage.COMBINE: layer.is_all_to_all,
        Stage.TAIL: is_summed and layer.shared is not SharedExpertMode.LOCAL,
    }
    for stage, name in _TOKEN_TENSORS:
        if whole.get(stage, True):
            ranks = subject.ranks_of_tokens(stage)
            yield (stage, name), tokens_in_order(subject.of_tokens(stage, name), ranks)


def _route_values(subject: Subject) -> Iterator[tuple[tuple[Stage, str], NamedRows]]:
    shards = subject.layer.layout.moe_tp
    for stage, name in _ROUTE_TENSORS:
        is_sharded = stage in (Stage.GEMM1, Stage.ACTIVATION)
        if shards == 1 or stage is not Stage.GEMM2:
            yield (stage, name), _route_rows(subject, stage, name, shards if is_sharded else 1)


def _route_rows(subject: Subject, stage: Stage, name: str, shards: int) -> NamedRows:
    """Rows of routes by token and slot; columns of ``shards`` shards joined, else shard 0's."""
    layer, rows = subject.layer, subject.route_rows
    shard = torch.tensor([layer.expert_shard(rank).index for rank in subject.ranks])[rows.rank]
    kept = ((rows.token != PADDING) & (shard < shards)).nonzero()[:, 0]
    piece = ((rows.token * layer.top_k + rows.slot) * shards + shard)[kept]
    order = piece.argsort()
    every = piece[order] // shards
    starts = every.diff(prepend=every.new_full((1,), -1)) != 0
    names, counts = every[starts], torch.bincount(starts.cumsum(0) - 1)
    is_whole = counts == shards  # a fault may lose or double a shard's row
    chosen = kept[order][is_whole.repeat_interleave(counts)]
    values = subject.route_values(stage, name)[chosen]
    halves = 2 if stage is Stage.GEMM1 else 1  # gate columns, then up columns
    pieces = values.view(int(is_whole.sum()), shards, halves, -1)
    return NamedRows(
        names=names[is_whole],
        values=pieces.transpose(1, 2).flatten(1),
        ranks=rows.rank[chosen[::shards]],
    )


def parting_of(
    stage: Stage, tensor: str, one: NamedRows, other: NamedRows, top_k: int
) -> Parting | None:
    """The first cell in which rows of the same name differ."""
    here = torch.isin(one.names, other.names)
    there = torch.isin(other.names, one.names)
    names, mine, theirs = one.names[here], one.values[here], other.values[there]
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    if bool(same.all()):
        return None
    row, column = (int(at) for at in (~same).nonzero()[0])
    by_token = (stage, tensor) in _TOKEN_TENSORS
    token, slot = (int(names[row]), None) if by_token else divmod(int(names[row]), top_k)
    return Parting(
        stage=stage,
        tensor=tensor,
        token=token,
        slot=slot,
        column=column,
        one=float(mine[row, column]),
        other=float(theirs[row, column]),
        cells=int((~same).sum()),
        of=same.numel(),
        rank=None if other.ranks is None else int(other.ranks[there][row]),
    )

"""The same tokens under two topologies: where their bits part first, and where they may.

Rows are compared by token and slot, with the columns of shards side by side, as values: a code
times its scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import PartialStores
from reports.verdict import route_values
from reports.verdict.canonical import TOKEN_TENSORS, CanonicalForward, Key, NamedRows
from reports.verdict.format_views import view_of
from reports.verdict.layer import JudgedLayer
from topology.sync import Gather


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


def first_parting(one: CanonicalForward, other: CanonicalForward) -> Parting | None:
    """Where the values of two forwards of the same tokens part first; None: nowhere."""
    for key in one.values:
        if key in other.values:
            parting = parting_of(key, one.values[key], other.values[key], one.layer.top_k)
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
    shards = [each.layout.moe_tp for each in both]
    yield (
        Stage.GEMM1,
        shards[0] != shards[1] and not all(each.arithmetic.columns_stand_alone for each in both),
        "the GEMM backend does not promise that a shard's columns have the bits of the whole's",
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
    yield (
        Stage.GEMM2,
        shards[0] != shards[1],
        f"an expert's row is stored as bf16 by each of its shards: {shards[0]} or {shards[1]}",
    )
    yield (
        Stage.POST_PERMUTE,
        _differ(map(_summed_together, both)),
        "a token's routes are summed, and stored as bf16, "
        + " or ".join(_sum_of_routes(each) for each in both),
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


def _sum_of_routes(layer: JudgedLayer) -> str:
    """Who adds the rows of a token's routes before they are stored."""
    if view_of(layer).partials is PartialStores.NOTHING:
        return "all at once at home"
    return f"rank by rank, on {layer.layout.ep}"


def parting_of(
    key: Key, one: NamedRows, other: NamedRows, top_k: int, compared: Tensor | None = None
) -> Parting | None:
    """The first cell in which rows of the same name differ.

    Args:
        key: the tensor that both are of.
        one: of one forward.
        other: of the other one.
        top_k: slots of a token.
        compared: [names, C] bool, cells that are compared; None: all.
    """
    here = torch.isin(one.names, other.names).nonzero()[:, 0]
    there = torch.isin(other.names, one.names).nonzero()[:, 0]
    found, cells, width = None, 0, one.width
    for mine, theirs in zip(_blocks(here, width), _blocks(there, width), strict=True):
        names, ours, due = one.names[mine], one.at(mine), other.at(theirs)
        differs = ours != due
        if bool(differs.any()):
            differs &= ~(ours.isnan() & due.isnan())
        if compared is not None:
            differs &= compared[names]
        cells += int(differs.sum())
        if found is None and bool(differs.any()):
            row, column = (int(at) for at in differs.nonzero()[0])
            token, slot = int(names[row]), None
            if key not in TOKEN_TENSORS:
                token, slot = divmod(token, top_k)
            found = Parting(
                stage=key[0],
                tensor=key[1],
                token=token,
                slot=slot,
                column=column,
                one=float(ours[row, column]),
                other=float(due[row, column]),
                cells=0,
                of=len(here) * width,
                rank=None if other.ranks is None else int(other.ranks[theirs[row]]),
            )
    return found and replace(found, cells=cells)


def _blocks(places: Tensor, width: int) -> tuple[Tensor, ...]:
    """Places of rows in parts of as many cells as are compared at once."""
    return torch.split(places, max(route_values.CELLS_AT_ONCE // max(width, 1), 1))

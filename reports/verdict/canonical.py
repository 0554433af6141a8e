"""What a forward computed, by token and slot: coordinates that no topology enters.

Rows stay as they were traced, codes beside their scales, and are decoded where they are compared.
Sums over part of a token's routes, or over a shard, have no counterpart in another topology and
are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from reports.verdict.decode import dequantized
from reports.verdict.layer import JudgedLayer
from reports.verdict.rows import take_rows
from reports.verdict.subject import Subject
from topology.sync import PADDING, Reducer

Key = tuple[Stage, str]
"""A tensor of a trace."""

OUTPUT: Final = (Stage.GLUE_OUT, "hidden_states")

TOKEN_TENSORS: Final[tuple[Key, ...]] = (
    (Stage.GLUE_IN, "hidden_states"),
    (Stage.ROUTE, "logits"),
    (Stage.ROUTE, "topk_ids"),
    (Stage.ROUTE, "topk_weights"),
    (Stage.COMBINE, "routed"),
    (Stage.TAIL, "output"),
    OUTPUT,
)
_ROUTE_TENSORS: Final[tuple[Key, ...]] = (
    (Stage.PRE_PERMUTE, "rows.hidden_states"),
    (Stage.GEMM1, "gate_up"),
    (Stage.ACTIVATION, "hidden_states"),
    (Stage.GEMM2, "output"),
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NamedRows:
    """N rows of one tensor, ordered by their names.

    names       [N] int64  token, or token * K + slot
    traced      [N * S, C / S] as traced; S shards of a row one after the other
    scale       [N * S, G] that belong to it, or None
    group_size  columns that share a scale
    shards      S
    halves      parts of a shard's columns: 2 for gate columns, then up columns
    ranks       [N] int64  where they were; None: not kept
    """

    names: Tensor
    traced: Tensor
    scale: Tensor | None = None
    group_size: int = 0
    shards: int = 1
    halves: int = 1
    ranks: Tensor | None = None

    @property
    def width(self) -> int:
        """Columns of a whole row."""
        return self.traced.shape[1] * self.shards

    @property
    def values(self) -> Tensor:
        """[N, C] float64, all of them."""
        return self.at(torch.arange(len(self.names)))

    def at(self, rows: Tensor) -> Tensor:
        """[R, C] float64 of some rows, codes times their scales, columns of shards side by side.

        Args:
            rows: [R] int64 places among the names.
        """
        pieces = (rows[:, None] * self.shards + torch.arange(self.shards)).flatten()
        scale = None if self.scale is None else take_rows(self.scale, pieces)
        values = dequantized(take_rows(self.traced, pieces), scale, self.group_size)
        parts = torch.unflatten(values, 0, (len(rows), self.shards))
        halves = torch.unflatten(parts, 2, (self.halves, -1))
        return halves.transpose(1, 2).flatten(1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CanonicalForward:
    """What a forward computed.

    layer   its facts
    values  (stage, tensor) -> rows, in the order of the pipeline; only what is whole
    """

    layer: JudgedLayer
    values: Mapping[Key, NamedRows]

    @property
    def output(self) -> Tensor:
        """[T, H] bf16."""
        return self.values[OUTPUT].traced

    def kept(self) -> "CanonicalForward":
        """The same with rows of its own, so that the traces can go."""
        return CanonicalForward(layer=self.layer, values=dict(self.values))


def canonical_forward(subject: Subject) -> CanonicalForward:
    """A forward's values, taken out of ranks, rows and shards whenever one is asked for."""
    return CanonicalForward(layer=subject.layer, values=_OfTraces(subject))


def tokens_in_order(values: Tensor, ranks: Tensor | None = None) -> NamedRows:
    """Rows [T, C] that belong to the tokens of the list, one after the other."""
    return NamedRows(names=torch.arange(len(values)), traced=values, ranks=ranks)


class _OfTraces(Mapping[Key, NamedRows]):
    """Reads a tensor's rows from the traces each time that it is asked for them."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        keys = [*_whole_of_tokens(subject.layer), *_whole_of_routes(subject.layer)]
        self._keys = sorted(keys, key=lambda key: key[0].position)

    def __getitem__(self, key: Key) -> NamedRows:
        if key not in self._keys:
            raise KeyError(key)
        subject, (stage, name) = self._subject, key
        if key in TOKEN_TENSORS:
            ranks = subject.ranks_of_tokens(stage)
            return tokens_in_order(subject.of_tokens(stage, name), ranks)
        is_sharded = stage in (Stage.GEMM1, Stage.ACTIVATION)
        return _route_rows(subject, key, subject.layer.layout.moe_tp if is_sharded else 1)

    def __contains__(self, key: object) -> bool:
        return key in self._keys  # reads nothing

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _whole_of_tokens(layer: JudgedLayer) -> Iterator[Key]:
    is_summed = layer.sync.reducer is not Reducer.GLUE_OUT
    whole = {
        Stage.COMBINE: layer.is_all_to_all,
        Stage.TAIL: is_summed and layer.shared is not SharedExpertMode.LOCAL,
    }
    yield from (key for key in TOKEN_TENSORS if whole.get(key[0], True))


def _whole_of_routes(layer: JudgedLayer) -> Iterator[Key]:
    is_whole = layer.layout.moe_tp == 1
    yield from (key for key in _ROUTE_TENSORS if is_whole or key[0] is not Stage.GEMM2)


def _route_rows(subject: Subject, key: Key, shards: int) -> NamedRows:
    """Rows of routes by token and slot, of ``shards`` shards, or of shard 0 alone."""
    (stage, name), layer, rows = key, subject.layer, subject.route_rows
    shard = torch.tensor([layer.expert_shard(rank).index for rank in subject.ranks])[rows.rank]
    kept = ((rows.token != PADDING) & (shard < shards)).nonzero()[:, 0]
    piece = ((rows.token * layer.top_k + rows.slot) * shards + shard)[kept]
    order = piece.argsort(stable=True)
    every = piece[order] // shards
    starts = every.diff(prepend=every.new_full((1,), -1)) != 0
    names, counts = every[starts], torch.bincount(starts.cumsum(0) - 1)
    is_whole = counts == shards  # a fault may lose or double a shard's row
    chosen = kept[order][is_whole.repeat_interleave(counts)]
    scale = subject.route_scale(stage, f"{name}_scale")
    return NamedRows(
        names=names[is_whole],
        traced=take_rows(subject.route_tensor(stage, name), chosen),
        scale=None if scale is None else take_rows(scale, chosen),
        group_size=layer.scales_of(stage, name).group_size,
        shards=shards,
        halves=2 if stage is Stage.GEMM1 else 1,
        ranks=rows.rank[chosen[::shards]],
    )

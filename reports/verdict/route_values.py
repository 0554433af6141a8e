"""What grouped rows hold at the routes of some ranks, and the experts that they meet."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import ref

from torch import Tensor

from moe.formats import Stage
from reports.verdict.decode import dequantized
from reports.verdict.rows import Rows, cat_rows, distinct, take_rows

if TYPE_CHECKING:
    from reports.verdict.subject import Subject

CELLS_AT_ONCE = 1 << 24
"""Cells of one stage that are compared together, unless one rank has more: 128 MiB as float64."""


class RouteValues:
    """Rows of the computed routes of some ranks, ranks ascending.

    Args:
        subject: the forward.
        ranks: ascending.
        keeps: values are asked for again.
    """

    def __init__(self, subject: "Subject", ranks: Sequence[int], *, keeps: bool) -> None:
        self._to_subject = ref(subject)  # which keeps these: both, and all traces, go at once
        self._ranks = ranks
        self._keeps = keeps
        self._kept: dict[tuple[Stage, str], Tensor] = {}

    @property
    def _subject(self) -> "Subject":
        subject = self._to_subject()
        assert subject is not None, "routes are read while their forward is there"
        return subject

    @cached_property
    def rows(self) -> Rows:
        """Coordinates of the N routes."""
        return Rows.cat([self._subject.computed[rank].rows for rank in self._ranks])

    def tensor(self, stage: Stage, name: str) -> Tensor:
        """[N, ...] rows of a stage's tensor."""
        subject = self._subject
        return cat_rows(
            [
                take_rows(subject.grouped(stage, rank, name), subject.computed[rank].row)
                for rank in self._ranks
            ]
        )

    def scale(self, stage: Stage, name: str) -> Tensor | None:
        """``tensor``, or None where the recipe has no such scale."""
        return self.tensor(stage, name) if name in self._subject.stage(stage, 0) else None

    def values(self, stage: Stage, name: str) -> Tensor:
        """[N, C] float64 of ``tensor``, codes times their scales."""
        if (stage, name) in self._kept:
            return self._kept[stage, name]
        scale = self.scale(stage, f"{name}_scale")
        group_size = self._subject.layer.scales_of(stage, name).group_size
        values = dequantized(self.tensor(stage, name), scale, group_size)
        if self._keeps:
            self._kept[stage, name] = values
        return values

    def slots(self) -> Iterator[tuple[int, int, Tensor]]:
        """(rank, local slot, positions in ``rows``) of every slot that has routes.

        The slot is the one the route's grouped row is multiplied with, right or wrong: a GEMM
        answers for its arithmetic, not for its input. Rows of no local slot are left out.
        """
        start, per_rank = 0, self._subject.layer.slots_per_rank
        for rank in self._ranks:
            rows = self._subject.computed[rank].row
            local = self._subject.slot_of_row[rank][rows]
            for slot in distinct(local[(local >= 0) & (local < per_rank)]):
                yield rank, slot, start + (local == slot).nonzero()[:, 0]
            start += len(rows)


def in_parts(subject: "Subject") -> list[RouteValues]:
    """The routes of all ranks, in as few parts as their widest stage allows; ranks stay whole."""
    layer = subject.layer
    gate_up = 2 * layer.intermediate_size // layer.expert_shard(0).count
    width = max(layer.expert_hidden_size, gate_up)
    parts: list[list[int]] = [[]]
    cells = 0
    for rank in subject.ranks:
        of_rank = len(subject.computed[rank].row) * width
        if parts[-1] and cells + of_rank > CELLS_AT_ONCE:
            parts.append([])
            cells = 0
        parts[-1].append(rank)
        cells += of_rank
    if len(parts) == 1:
        return [subject.all_routes]
    return [RouteValues(subject, part, keeps=False) for part in parts]

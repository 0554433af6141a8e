"""Where every comparison is entered: the worst of each stage and rank, and what broke a rule."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.rows import Rows, distinct

COLUMN_BLOCK = 128
MOVES = "contract: moves"

SLOT_TENSORS = (
    "topk_ids",
    "topk_weights",
    "physical_ids",
    "restore.topk_ids",
    "restore.topk_weights",
    "pending_weights",
    "handle.topk_ids",
)
"""Tensors whose columns are top-k slots, unless their rows belong to one already."""

SAMPLED_CELLS = 4096
"""Cells of a tensor from which the smallest visible effect is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One thing that is not as it should be; fields as in ``result.json``'s divergence.

    ratio  error / band; infinite for a broken rule or an unequal move
    rows   how many rows of this rank and tensor deviate
    """

    check: str
    stage: Stage
    rank: int
    tensor: str
    detail: str
    ratio: float = float("inf")
    rows: int = 1
    token: int | None = None
    slot: int | None = None
    expert: int | None = None
    columns: tuple[int, int] | None = None
    got: float | None = None
    want: float | None = None
    band: float | None = None

    @property
    def blame(self) -> tuple[int, bool, bool, float, int]:
        """Earlier stages first; own errors before lost bits, tokens before counts, the largest."""
        loses_bits = self.check.startswith("determinism")
        return self.stage.position, loses_bits, self.token is None, -self.ratio, self.rank


@dataclass(slots=True)
class Ledger:
    """Everything the checks of one forward entered.

    blinded     checks that report nothing: an injected fault of the checker
    worst       (stage, rank) -> worst error / band
    asked       checks that had something to look at
    banded      stages where a band was laid on values
    deviations  what broke a rule
    effects     stage -> relative effect that half of its cells would have shown
    unbounded   stage -> cells that may overflow, so that no band bounds them
    """

    blinded: frozenset[str] = frozenset()
    worst: dict[tuple[Stage, int], float] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    banded: set[Stage] = field(default_factory=set)
    deviations: list[Deviation] = field(default_factory=list)
    effects: dict[Stage, float] = field(default_factory=dict)
    unbounded: dict[Stage, int] = field(default_factory=dict)

    def copy(self) -> "Ledger":
        """A ledger that starts with what this one holds."""
        return deepcopy(self)

    def sort(self) -> None:
        """Bring deviations into the order of blame: earliest stage, then the best located."""
        self.deviations.sort(key=lambda deviation: deviation.blame)

    def report(self, deviation: Deviation) -> None:
        """Enter one broken rule."""
        if deviation.check not in self.blinded:
            self.deviations.append(deviation)
            self._raise_worst(deviation.stage, deviation.rank, deviation.ratio)

    def passed(self, stage: Stage, rank: int) -> None:
        """Enter that a rank's stage was looked at and nothing was found there so far."""
        self._raise_worst(stage, rank, 0.0)

    def cells(
        self,
        check: str,
        stage: Stage,
        tensor: str,
        rows: Rows,
        *,
        got: Tensor,
        want: Tensor,
        band: Tensor,
    ) -> None:
        """Compare cell by cell and enter the worst row of every rank.

        Args:
            check: name of the asking check.
            stage: where the error is owned.
            tensor: name in the trace.
            rows: coordinates of N rows.
            got: [N, C] float64.
            want: [N, C] float64.
            band: [N, C] float64, largest error allowed.
        """
        if check not in self.blinded and got.numel():
            ratio = error_over_band(got, want, band)
            self.banded.add(stage)
            self._note_unbounded(stage, band)
            self._note_effect(stage, want, band)
            cells = _Cells(got, want, band, ratio)
            self._enter(check, stage, tensor, rows, cells, cells.relative_error)

    def steps(
        self,
        check: str,
        stage: Stage,
        tensor: str,
        rows: Rows,
        *,
        got: Tensor,
        want: Tensor,
        legal: Tensor,
        explain: Callable[[Tensor], str] | None = None,
    ) -> None:
        """Enter values of a step function: each is ``legal`` [N, C] bool or it is wrong.

        ``explain`` has words for the rows at some places; other arguments as in ``cells``.
        """
        if check in self.blinded or not got.numel():
            return
        self.ask(check)
        for rank in distinct(rows.rank):
            self.passed(stage, rank)
        if not bool(legal.all()):
            ratio = torch.where(legal, 0.0, torch.inf).to(torch.float64)
            cells = _Cells(got, want, torch.zeros_like(ratio), ratio)
            self._enter(check, stage, tensor, rows, cells, explain)

    def moved(self, stage: Stage, tensor: str, rows: Rows, *, got: Tensor, want: Tensor) -> None:
        """Compare data that was only moved: every bit has to be the same.

        Args:
            stage: where the move happened.
            tensor: name in the trace.
            rows: coordinates of N rows.
            got: [N, C] of any dtype.
            want: [N, C] of the same dtype.
        """
        legal = bitwise_equal(got, want)
        if not bool(legal.all()):
            got, want = got.to(torch.float64), want.to(torch.float64)
        self.steps(MOVES, stage, tensor, rows, got=got, want=want, legal=legal)

    def ask(self, check: str) -> None:
        """Enter that a check looks at something, whether or not it finds anything."""
        self.asked.add(check)

    def _enter(
        self,
        check: str,
        stage: Stage,
        tensor: str,
        rows: Rows,
        cells: "_Cells",
        explain: Callable[[Tensor], str] | None = None,
    ) -> None:
        self.ask(check)
        row_worst, column = cells.ratio.max(dim=1)
        for rank in distinct(rows.rank):
            here = (rows.rank == rank).nonzero()[:, 0]
            at = int(here[row_worst[here].argmax()])
            self._raise_worst(stage, rank, float(row_worst[at]))
            if row_worst[at] > 1:
                count = int((row_worst[here] > 1).sum())
                where = cells.at(at, int(column[at]))
                slot = _known(rows.slot[at])
                if tensor in SLOT_TENSORS and slot is None:
                    slot, where["columns"] = int(column[at]), None
                detail = f"{count} of {len(here)} rows differ; worst in column {int(column[at])}"
                words = explain(here) if explain else ""
                detail += words and f"; {words}"
                self.deviations.append(
                    Deviation(
                        check=check,
                        stage=stage,
                        rank=rank,
                        tensor=tensor,
                        detail=detail,
                        rows=count,
                        token=_known(rows.token[at]),
                        slot=slot,
                        expert=_known(rows.expert[at]),
                        **where,
                    )
                )

    def _raise_worst(self, stage: Stage, rank: int, ratio: float) -> None:
        self.worst[stage, rank] = max(self.worst.get((stage, rank), 0.0), ratio)

    def _note_unbounded(self, stage: Stage, band: Tensor) -> None:
        """Count what nothing bounds; most bands have no such cell."""
        if bool(band.isinf().any()):
            self.unbounded[stage] = self.unbounded.get(stage, 0) + int(band.isinf().sum())

    def _note_effect(self, stage: Stage, want: Tensor, band: Tensor) -> None:
        """What half of the live cells would have shown: the median of band / |want|, sampled."""
        step = max(1, want.numel() // SAMPLED_CELLS)
        want, band = want.flatten()[::step], band.flatten()[::step]
        live = (want != 0) & band.isfinite()
        if bool(live.any()):
            effect = float((band[live] / want[live].abs()).median())
            self.effects[stage] = max(self.effects.get(stage, 0.0), effect)


class _Place(TypedDict):
    """The part of a deviation that a cell fills in."""

    ratio: float
    columns: tuple[int, int] | None
    got: float
    want: float
    band: float


@dataclass(frozen=True, slots=True)
class _Cells:
    """[N, C] float64 each."""

    got: Tensor
    want: Tensor
    band: Tensor
    ratio: Tensor

    def relative_error(self, here: Tensor) -> str:
        """Of the wrong rows among ``here``, as a whole, in words; empty where one is no number."""
        wrong = here[(self.ratio[here] > 1).any(1)]
        error = (self.got[wrong] - self.want[wrong]).norm() / self.want[wrong].norm()
        return f"relative error of those rows: {float(error):.2g}" if error.isfinite() else ""

    def at(self, row: int, column: int) -> _Place:
        """One cell, with the column block around it."""
        first = column // COLUMN_BLOCK * COLUMN_BLOCK
        return _Place(
            ratio=float(self.ratio[row, column]),
            columns=(first, min(first + COLUMN_BLOCK, self.got.shape[1])),
            got=float(self.got[row, column]),
            want=float(self.want[row, column]),
            band=float(self.band[row, column]),
        )


def error_over_band(got: Tensor, want: Tensor, band: Tensor) -> Tensor:
    """|got - want| / band; infinite where only one of them is a number.

    0 where both are equal, where neither is a finite number and one is none at all (an infinity
    that met another, in another order of operations), and under an infinite band: what may
    overflow may become anything.
    """
    ratio = (got - want).abs_().div_(band)
    if bool(ratio.isfinite().all()):
        return ratio
    neither_finite = ~got.isfinite() & ~want.isfinite()
    same = (
        (got == want)
        | (neither_finite & (got.isnan() | want.isnan()))
        | (band.isinf() & want.isfinite())
    )
    return ratio.nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(same, 0.0)


def bitwise_equal(got: Tensor, want: Tensor) -> Tensor:
    """[N, C] bool: cells whose bytes are the same; all False for another dtype or shape."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return torch.zeros(got.shape, dtype=torch.bool)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return got.view(width) == want.view(width)


def _known(coordinate: Tensor) -> int | None:
    return int(coordinate) if coordinate >= 0 else None

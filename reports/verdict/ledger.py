"""Where every comparison is entered: the worst of each stage and rank, and what broke a rule."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.cells import Cells, all_finite, error_over_band
from reports.verdict.deviation import Deviation, NotAsked
from reports.verdict.evidence import Evidence, free_room
from reports.verdict.quantiser_note import QuantiserNote
from reports.verdict.rows import Rows, distinct
from reports.verdict.tallies import Tally

if TYPE_CHECKING:
    from reports.verdict.compared import Comparison

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


@dataclass(slots=True)
class Ledger:
    """Everything the checks of one forward entered.

    blinded     checks that report nothing: an injected fault of the checker
    worst       (stage, rank) -> worst error / band
    asked       checks that had something to look at
    banded      stages where a band was laid on values
    deviations  what broke a rule
    evidence    both sides of the comparisons that deviations came from; broken contracts have none
    room        cells that more evidence may have
    tallies     (stage, tensor) -> how its values lie about the golden's
    unbounded   stage -> cells that may overflow, so that no band bounds them
    kept        comparisons of arithmetic, where they are to be kept
    not_asked   parts of checks without something to look at
    """

    blinded: frozenset[str] = frozenset()
    worst: dict[tuple[Stage, int], float] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    banded: set[Stage] = field(default_factory=set)
    deviations: list[Deviation] = field(default_factory=list)
    evidence: dict[Deviation, Evidence] = field(default_factory=dict)
    room: int = field(default_factory=free_room)
    tallies: dict[tuple[Stage, str], Tally] = field(default_factory=dict)
    unbounded: dict[Stage, int] = field(default_factory=dict)
    kept: "list[Comparison] | None" = None
    not_asked: list[NotAsked] = field(default_factory=list)

    def copy(self) -> "Ledger":
        """A ledger that starts with what this one holds."""
        return deepcopy(self)

    def take(self, other: "Ledger") -> None:
        """Enter what another ledger has of deviations, of the same forward."""
        self.asked |= other.asked
        self.deviations += other.deviations
        self.evidence |= other.evidence
        for (stage, rank), ratio in other.worst.items():
            self._raise_worst(stage, rank, ratio)

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
            cells = Cells(got, want, band, ratio)
            self._enter(check, stage, tensor, rows, cells)

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
        note: QuantiserNote | None = None,
    ) -> None:
        """Enter values of a step function: each is ``legal`` [N, C] bool or it is wrong.

        ``note`` has words for the rows of a quantiser; other arguments as in ``cells``.
        """
        if check in self.blinded or not got.numel():
            return
        self.ask(check)
        for rank in distinct(rows.rank):
            self.passed(stage, rank)
        if not bool(legal.all()):
            ratio = torch.where(legal, 0.0, torch.inf).to(torch.float64)
            is_code = not check.startswith("band")  # what is stored is a value, and has a size
            cells = Cells(got, want, torch.zeros_like(ratio), ratio, is_code=is_code)
            self._enter(check, stage, tensor, rows, cells, note)

    def matrix(
        self,
        check: str,
        tensor: str,
        rows: Rows,
        *,
        got: Tensor,
        want: Tensor,
        legal: Tensor,
        local: int,
    ) -> None:
        """Enter a prepared matrix of the expert in the rank's slot ``local``; else as ``steps``."""
        before = len(self.deviations)
        self.steps(check, Stage.WEIGHTS, tensor, rows, got=got, want=want, legal=legal)
        for one in self.deviations[before:]:
            self.evidence[one] = replace(self.evidence[one], local=local)

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

    def tally(
        self, stage: Stage, tensor: str, columns: int, *, stored: bool, drawn: bool = False
    ) -> Tally:
        """Where the values of a tensor with so many columns are counted; see ``Tally``."""
        fresh = Tally(columns=columns, stored=stored, signs_are_drawn=drawn)
        return self.tallies.setdefault((stage, tensor), fresh)

    def ask(self, check: str) -> None:
        """Enter that a check looks at something, whether or not it finds anything."""
        self.asked.add(check)

    def put_aside(self, part: NotAsked) -> None:
        """Enter, once, that a part of a check is left out."""
        if part not in self.not_asked:
            self.not_asked.append(part)

    def _enter(
        self,
        check: str,
        stage: Stage,
        tensor: str,
        rows: Rows,
        cells: Cells,
        note: QuantiserNote | None = None,
    ) -> None:
        self.ask(check)
        row_worst = cells.ratio.amax(dim=1)
        both_sides = None
        for rank in distinct(rows.rank):
            here = (rows.rank == rank).nonzero()[:, 0]
            at = int(here[row_worst[here].argmax()])
            self._raise_worst(stage, rank, float(row_worst[at]))
            if row_worst[at] > 1:
                count = int((row_worst[here] > 1).sum())
                column = int(cells.ratio[at].argmax())
                where = cells.at(at, column)
                slot = _known(rows.slot[at])
                if tensor in SLOT_TENSORS and slot is None:
                    slot, where["columns"] = column, None
                detail = f"{count} of {len(here)} rows differ; worst in column {column}"
                words = note(here) if note else cells.relative_error(here)
                detail += words and f"; {words}"
                found = Deviation(
                    check=check,
                    stage=stage,
                    rank=rank,
                    tensor=tensor,
                    detail=detail,
                    size=words,
                    rows=count,
                    token=_known(rows.token[at]),
                    slot=slot,
                    expert=_known(rows.expert[at]),
                    **where,
                )
                self.deviations.append(found)
                if both_sides is None:
                    both_sides = cells.evidence(rows, note, self.room)
                    self.room = max(self.room - both_sides.size, 0)
                self.evidence[found] = both_sides

    def _raise_worst(self, stage: Stage, rank: int, ratio: float) -> None:
        self.worst[stage, rank] = max(self.worst.get((stage, rank), 0.0), ratio)

    def _note_unbounded(self, stage: Stage, band: Tensor) -> None:
        """Count what nothing bounds; most bands have no such cell."""
        if not all_finite(band):
            unbounded = int(band.isinf().sum())
            if unbounded:
                self.unbounded[stage] = self.unbounded.get(stage, 0) + unbounded


def bitwise_equal(got: Tensor, want: Tensor) -> Tensor:
    """[N, C] bool: cells whose bytes are the same; all False for another dtype or shape."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return torch.zeros(got.shape, dtype=torch.bool)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return got.view(width) == want.view(width)


def _known(coordinate: Tensor) -> int | None:
    return int(coordinate) if coordinate >= 0 else None

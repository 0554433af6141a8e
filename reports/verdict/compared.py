"""The comparison of arithmetic: by its band, and where it is stored as bf16, by its store."""

from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from moe.formats import Stage
from reports.verdict.band import stored_bf16
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from reports.verdict.stores import StoredCells, check_stores, note_sample

BAND: Final = "band"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Comparison:
    """Values of a stage and the golden's, [N, C] float64 each.

    rows     coordinates of N rows
    want     in front of the store
    noise    largest error declared there
    stored   as bf16; otherwise fp32 is kept, and ``noise`` is the band
    signs_are_drawn  errors are those of many roundings to nearest, whose signs have nothing in
                     common
    """

    stage: Stage
    tensor: str
    rows: Rows
    got: Tensor
    want: Tensor
    noise: Tensor
    stored: bool
    signs_are_drawn: bool = False

    @property
    def band(self) -> Tensor:
        """Largest error of what is stored or kept."""
        return stored_bf16(self.want, self.noise) if self.stored else self.noise

    def of_rows(self, index: Tensor) -> "Comparison":
        """The same of some rows."""
        return replace(
            self,
            rows=self.rows[index],
            got=self.got[index],
            want=self.want[index],
            noise=self.noise[index],
        )

    def enter(self, ledger: Ledger) -> None:
        """Ask the band, then the store; count what the distribution is asked of."""
        if not self.got.numel():
            return
        where, band = (self.stage, self.tensor, self.rows), self.band
        ledger.cells(BAND, *where, got=self.got, want=self.want, band=band)
        if self.stored:
            cells = StoredCells(
                got=self.got,
                want=self.want,
                noise=self.noise,
                signs_are_drawn=self.signs_are_drawn,
            )
            check_stores(ledger, *where, cells)
            return
        tally = ledger.tally(self.stage, self.tensor, self.got.shape[1], stored=False)
        tally.count(self.rows)
        note_sample(tally, self.want, band, stored=False)


def check_stored(
    ledger: Ledger,
    stage: Stage,
    tensor: str,
    rows: Rows,
    *,
    got: Tensor,
    want: Tensor,
    noise: Tensor,
    signs_are_drawn: bool = False,
) -> None:
    """Compare a value that is stored as bf16; arguments as in ``Comparison``."""
    comparison = Comparison(
        stage=stage,
        tensor=tensor,
        rows=rows,
        got=got,
        want=want,
        noise=noise.expand(want.shape),
        stored=True,
        signs_are_drawn=signs_are_drawn,
    )
    _enter(comparison, ledger)


def check_kept(
    ledger: Ledger,
    stage: Stage,
    tensor: str,
    rows: Rows,
    *,
    got: Tensor,
    want: Tensor,
    band: Tensor,
) -> None:
    """Compare a value that stays fp32; arguments as in ``Comparison``."""
    comparison = Comparison(
        stage=stage, tensor=tensor, rows=rows, got=got, want=want, noise=band, stored=False
    )
    _enter(comparison, ledger)


def _enter(comparison: Comparison, ledger: Ledger) -> None:
    if ledger.kept is not None:
        ledger.kept.append(comparison)
    comparison.enter(ledger)

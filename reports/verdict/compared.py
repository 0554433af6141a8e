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
    leaning  the part of it that may have one sign in all cells; see ``StoredCells``
    stored   as bf16; otherwise fp32 is kept, and ``noise`` is the band
    """

    stage: Stage
    tensor: str
    rows: Rows
    got: Tensor
    want: Tensor
    noise: Tensor
    leaning: Tensor | None = None
    stored: bool

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
            leaning=None if self.leaning is None else self.leaning[index],
        )

    def enter(self, ledger: Ledger) -> None:
        """Ask the band, then the store; count what the distribution is asked of."""
        if not self.got.numel():
            return
        where, band = (self.stage, self.tensor, self.rows), self.band
        ledger.cells(BAND, *where, got=self.got, want=self.want, band=band)
        if self.stored:
            cells = StoredCells(
                got=self.got, want=self.want, noise=self.noise, leaning=self.leaning
            )
            check_stores(ledger, *where, cells)
            return
        tally = ledger.tally(self.stage, self.tensor, self.got.shape[1], stored=False)
        tally.count(self.rows, None)
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
    leaning: Tensor | None = None,
) -> None:
    """Compare a value that is stored as bf16; arguments as in ``Comparison``."""
    comparison = Comparison(
        stage=stage,
        tensor=tensor,
        rows=rows,
        got=got,
        want=want,
        noise=noise.expand(want.shape),
        leaning=leaning,
        stored=True,
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

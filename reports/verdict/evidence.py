"""Both sides of a comparison that failed: kept for a diagnosis, and only where something failed."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from reports.verdict.quantiser_note import QuantiserNote
from reports.verdict.rows import Rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evidence:
    """What a comparison saw, of all ranks that it compared at once.

    rows       coordinates of N rows
    got, want  [N, C] float64
    band       [N, C] float64, largest error allowed; 0 where values have to be equal
    wrong      [N, C] bool
    quantiser  the codes and scales that it belongs to, where it is of a quantiser
    local      slot of the rank that holds it, where it is a matrix of an expert
    """

    rows: Rows
    got: Tensor
    want: Tensor
    band: Tensor
    wrong: Tensor
    quantiser: QuantiserNote | None = None
    local: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Evidence":
        """Nobody writes into it, so copies of a ledger share it."""
        return self

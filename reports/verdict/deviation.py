"""What a check enters: one thing that is not as it should be, or a part that was left out."""

from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from moe.formats import Stage


class Breach(StrEnum):
    """Which promise a broken contract breaks, where a diagnosis goes by it."""

    FORM_OF_SCALES = "form of scales"
    """Scales have another dtype or shape than their reader takes."""

    ZERO_PADDING = "zero padding"
    """Padding holds something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One thing that is not as it should be; fields as in ``result.json``'s divergence.

    ratio   error / band; infinite for a broken rule or an unequal move
    rows    how many rows of this rank and tensor deviate
    breach  of a broken contract, which
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
    size: str = ""
    breach: Breach | None = None

    @property
    def is_no_number(self) -> bool:
        """Whether NaN or infinity stands where a stage is due to compute a number."""
        if self.got is None or self.stage is Stage.WEIGHTS:  # matrices do not come of each other
            return False
        return not isfinite(self.got) and isfinite(self.want or 0.0)

    @property
    def blame(self) -> tuple[int, bool, bool, bool, float, int]:
        """Earlier stages first; own errors before lost bits, tokens before counts.

        Of those what is no number, from which wrong codes may come, then the largest error.
        """
        loses_bits, unplaced = self.check.startswith("determinism"), self.token is None
        return (
            self.stage.position,
            loses_bits,
            unplaced,
            not self.is_no_number,
            -self.ratio,
            self.rank,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAsked:
    """A part of a check that had to be left out, and why."""

    check: str
    what: str
    why: str

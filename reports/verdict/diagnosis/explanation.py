"""What a hypothesis says of a deviation, and which of them is believed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from torch import Tensor

from moe.mistakes import Mistake

ODDS: Final = 10.0
"""Bits, a thousand to one: by which a sure diagnosis beats what else explains as much."""

HYPOTHESES_ASKED: Final = 5.0
"""Bits to say which of 32 hypotheses it was, each of which may fit by luck."""


class Certainty(StrEnum):
    """How well a diagnosis explains a deviation."""

    NONE = "none"
    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Explanation:
    """One hypothesis, as far as it holds.

    mistake   the kind of mistake
    words     one clause with the numbers
    explains  [W] bool: of the W wrong rows those whose every value it predicts
    cost      bits that it takes to say which of its alternatives was picked: see ``bits_of_choice``
    evidence  bits that values which follow no law would have had to hit; None: those of the wrong
              cells of the rows that it explains; infinite: it says what was compared, in other
              words, so that luck has no part in it
    is_guess  it names a kind of mistake by its looks and predicts no value
    """

    mistake: Mistake
    words: str
    explains: Tensor
    cost: float = 0.0
    evidence: float | None = None
    is_guess: bool = False

    @property
    def share(self) -> float:
        """Of the wrong rows, how many it explains."""
        return float(self.explains.double().mean()) if len(self.explains) else 0.0

    @property
    def surplus(self) -> float:
        """Bits by which it explains more than its choice among alternatives would, by luck."""
        return (math.inf if self.evidence is None else self.evidence) - self.cost


def bits_of_choice(alternatives: int, times: int = 1) -> float:
    """What it takes to say which of so many alternatives was picked, so many times over."""
    return times * math.log2(max(alternatives, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a deviation looks like.

    words  one sentence; ``unexplained: ...`` where nothing explains it
    """

    words: str
    mistake: Mistake | None = None
    certainty: Certainty = Certainty.NONE


def believed(found: Sequence[Explanation]) -> Diagnosis | None:
    """The explanation of most rows; of equally many, the one that had the least to choose from.

    Only those count that explain more than half of the rows. It is sure if it explains every row,
    by luck in one of a thousand cases at most, all hypotheses together, and if any other kind of
    mistake that does so had a thousand times as much to choose from.
    """
    most = [one for one in found if one.share > 1 / 2]
    ranked = sorted(most, key=lambda one: (one.is_guess, -one.share, one.cost))
    if not ranked:
        return None
    best = ranked[0]
    rivals = [one for one in ranked if _rivals(one, best)]
    words = best.words
    if best.share < 1:
        words += f" (of {len(best.explains)} wrong rows, {int(best.explains.sum())} are explained)"
    for rival in rivals[:1]:
        words += f"; or {rival.words}"
    is_sure = (
        best.share == 1
        and best.surplus >= ODDS + HYPOTHESES_ASKED
        and not rivals
        and not best.is_guess
    )
    return Diagnosis(
        words=words,
        mistake=best.mistake,
        certainty=Certainty.HIGH if is_sure else Certainty.LOW,
    )


def _rivals(one: Explanation, best: Explanation) -> bool:
    """Whether another kind of mistake does as well, with hardly more to choose from."""
    as_well = (one.is_guess, one.share) == (best.is_guess, best.share)
    return one.mistake is not best.mistake and as_well and one.cost - best.cost < ODDS

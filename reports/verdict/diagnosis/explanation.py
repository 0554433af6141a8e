"""What a hypothesis says of a deviation, and which of them is believed."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from moe.mistakes import Mistake


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
    choices   among how many alternatives it picked, for each row: a law that predicts the values
              outright has 1, "the row of some other token" as many as there are tokens
    is_guess  it names a kind of mistake by its looks and predicts no value
    """

    mistake: Mistake
    words: str
    explains: Tensor
    choices: int = 1
    is_guess: bool = False

    @property
    def share(self) -> float:
        """Of the wrong rows, how many it explains."""
        return float(self.explains.double().mean()) if len(self.explains) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a deviation looks like.

    words  one sentence; ``unexplained: ...`` where nothing explains it
    """

    words: str
    mistake: Mistake | None = None
    certainty: Certainty = Certainty.NONE


def believed(found: Sequence[Explanation]) -> Diagnosis | None:
    """The explanation of most rows; of equally many, the one with the fewest choices.

    Only those that explain more than half of the rows count. It is sure if it explains every row
    and no other kind of mistake does as well with as few choices.
    """
    most = [one for one in found if one.share > 1 / 2]
    ranked = sorted(most, key=lambda one: (one.is_guess, -one.share, one.choices))
    if not ranked:
        return None
    best = ranked[0]
    rivals = [
        one
        for one in ranked
        if one.mistake is not best.mistake
        and (one.is_guess, one.share) == (best.is_guess, best.share)
        and one.choices <= best.choices
    ]
    words = best.words
    if best.share < 1:
        words += f" (of {len(best.explains)} wrong rows, {int(best.explains.sum())} are explained)"
    for rival in rivals[:1]:
        words += f"; or {rival.words}"
    is_sure = best.share == 1 and not rivals and not best.is_guess
    return Diagnosis(
        words=words,
        mistake=best.mistake,
        certainty=Certainty.HIGH if is_sure else Certainty.LOW,
    )

"""When a sum has one answer in every order: few bits from its smallest quantum to its total."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.cells import all_finite

BF16_BITS = 8
FP32_BITS = 24

_MANTISSA_BITS = 52
_EXPONENT_MASK = 0x7FF << _MANTISSA_BITS

_LEAST = 2.0**-1074
"""Stands in for the quantum of what has none."""


def low_bit(values: Tensor) -> Tensor:
    """Largest power of two that divides each entry; infinite for 0, 0 for what is no number.

    Args:
        values: [...] float64; subnormals count as no numbers.
    """
    bits = values.contiguous().view(torch.int64)
    mantissa = (bits & ((1 << _MANTISSA_BITS) - 1)).bitwise_or_(1 << _MANTISSA_BITS)
    lowest = mantissa.bitwise_and_(-mantissa).to(torch.float64).mul_(2.0**-_MANTISSA_BITS)
    power = lowest.mul_((bits & _EXPONENT_MASK).view(torch.float64))
    if not all_finite(power):  # an exponent of all ones reads as infinite
        power.masked_fill_(~values.isfinite(), 0.0)
    return power.masked_fill_(values == 0, torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One kind of sum, over all of its cells.

    bits     that the narrowest sum of this kind keeps
    quantum  every term of the worst cell is a multiple of it
    largest  the sum of |terms| of that cell
    cells    how many sums there are
    certain  how many of them have one answer in every order
    """

    stage: Stage
    name: str
    bits: int
    quantum: float = 1.0
    largest: float = 0.0
    cells: int = 0
    certain: int = 0

    def worse(self, other: "Reduction") -> "Reduction":
        """Both together."""
        mine, theirs = self.largest / self.quantum, other.largest / other.quantum
        worst = other if theirs > mine else self
        return replace(worst, cells=self.cells + other.cells, certain=self.certain + other.certain)


@dataclass(slots=True)
class Conditions:
    """What the certificate asks of the cells, and how many of them comply.

    reductions  by stage and name
    counts      condition -> [cells that comply, all cells]
    """

    reductions: dict[tuple[Stage, str], Reduction] = field(default_factory=dict)
    counts: dict[str, list[int]] = field(default_factory=dict)

    def require(self, name: str, holds: Tensor) -> Tensor:
        """Count how many cells comply; ``holds`` itself, a bool tensor."""
        count = self.counts.setdefault(name, [0, 0])
        count[0] += int(holds.count_nonzero())
        count[1] += holds.numel()
        return holds

    def sums(
        self, stage: Stage, name: str, bits: int, *, quantum: Tensor, magnitude: Tensor
    ) -> Tensor:
        """Which sums have one answer: those whose |terms| add up to at most 2^bits quanta.

        Args:
            stage: where they are summed.
            name: of the kind of sum.
            bits: that the sum keeps.
            quantum: [...] float64, divides every term; infinite where there is none.
            magnitude: [...] float64, sum of |terms|.
        """
        holds = magnitude <= quantum * 2.0**bits
        found = Reduction(
            stage=stage,
            name=name,
            bits=bits,
            cells=holds.numel(),
            certain=int(holds.count_nonzero()),
        )
        if holds.numel():
            at = (magnitude / quantum).flatten().argmax()
            worst = float(magnitude.flatten()[at])
            divides = float(quantum.expand_as(magnitude).flatten()[at])
            if worst > 0:
                found = replace(found, quantum=divides or _LEAST, largest=worst)
        seen = self.reductions.get((stage, name))
        self.reductions[stage, name] = found if seen is None else seen.worse(found)
        return self.require(name, holds)

    def least(self) -> tuple[str | None, float]:
        """The condition that fewest of its cells fulfil, and their share; None: all fulfil all."""
        shares = {name: met / all_ for name, (met, all_) in self.counts.items() if met < all_}
        name = min(shares, key=lambda one: shares[one], default=None)
        return name, 1.0 if name is None else shares[name]

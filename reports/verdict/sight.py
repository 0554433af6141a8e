"""The smallest effects that a run's comparisons would have shown, by what the effect takes in.

An effect is a factor of 1 + e on everything it takes in, in front of the store. At twice the stated
e at least 95 of 100 such effects are reported, wherever they are; ``benchmarks/visible_effects.py``
injects them and counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.distribution import evidence_needed
from reports.verdict.ledger import Ledger
from reports.verdict.stores import leaning_of_a_constant
from reports.verdict.tallies import Kind, Sample, Sums, Tally

SHARE_REPORTED: Final = 0.95

_GRID: Final = torch.logspace(-9, 2, 133, dtype=torch.float64)
"""Effects that are tried; neighbours are a factor of 1.21 apart."""

_CELLS: Final = 1024
"""Of a tensor, that they are tried on."""

_DEVIATIONS: Final = 2.0
"""Standard deviations that a number of steps stays above with more than ``SHARE_REPORTED``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Smallest visible effects of one stage; None where no group or no live cell is there.

    cell     on one cell
    row      on one row
    by_kind  on all cells of one rank, expert or block of columns, whichever shows least
    """

    cell: float | None
    row: float | None
    by_kind: Mapping[Kind, float]


NOTHING_SEEN: Final = Sight(cell=None, row=None, by_kind=MappingProxyType({}))


def sight_of(ledger: Ledger) -> Mapping[Stage, Sight]:
    """What each stage with a band would have shown, in whichever of its tensors shows least."""
    evidence = evidence_needed(ledger)
    by_stage: dict[Stage, list[Sight]] = {}
    for (stage, _), tally in ledger.tallies.items():
        by_stage.setdefault(stage, []).append(_sight(tally, evidence))
    return {stage: _least(sights) for stage, sights in by_stage.items()}


def _least(sights: list[Sight]) -> Sight:
    """The largest of the smallest effects."""
    by_kind: dict[Kind, float] = {}
    for sight in sights:
        for kind, effect in sight.by_kind.items():
            by_kind[kind] = max(effect, by_kind.get(kind, 0.0))
    cells = [sight.cell for sight in sights if sight.cell is not None]
    rows = [sight.row for sight in sights if sight.row is not None]
    return Sight(cell=max(cells, default=None), row=max(rows, default=None), by_kind=by_kind)


def _sight(tally: Tally, evidence: float) -> Sight:
    """Of one tensor."""
    sample = _thinned(Sample.cat(tally.samples)) if tally.samples else None
    if sample is None or not len(sample.size):
        return NOTHING_SEEN
    shown = _shown(sample)
    log_missed = (-shown).log1p().mean(1)
    steps = _steps_a_cell(sample)
    by_kind: dict[Kind, float] = {}
    for group, sums in tally.sums.items():
        is_reported = (sums.cells * log_missed).exp() <= 1 - SHARE_REPORTED
        if tally.stored:
            is_reported |= _leans(sums, steps, evidence)
        effect = _half_of_first(is_reported)
        by_kind[group.kind] = max(effect, by_kind.get(group.kind, 0.0))
    return Sight(
        cell=_half_of_first(shown.mean(1) >= SHARE_REPORTED),
        row=_half_of_first((tally.columns * log_missed).exp() <= 1 - SHARE_REPORTED),
        by_kind=by_kind,
    )


def _thinned(sample: Sample) -> Sample:
    every = max(1, len(sample.size) // _CELLS)
    return Sample(sample.size[::every], sample.step[::every], sample.noise[::every])


def _shown(sample: Sample) -> Tensor:
    """[effects, S] probability that a cell alone shows an effect.

    A stored value leaves what it may be stored as once it is moved over the next boundary, which is
    anywhere within a step, by more than the noise; one that is kept once it is moved by two bands.
    """
    moved = _GRID[:, None] * sample.size
    of_stored = ((moved - sample.noise) / sample.step).clamp(0, 1)
    return torch.where(sample.step > 0, of_stored, (moved > 2 * sample.noise).to(torch.float64))


def _steps_a_cell(sample: Sample) -> Tensor:
    """[effects] steps that an effect causes in a cell on average."""
    return (_GRID[:, None] * sample.size / sample.step).clamp(max=1).mean(1)


def _leans(sums: Sums, steps: Tensor, evidence: float) -> Tensor:
    """[effects] bool: those whose steps in a group exceed what is allowed to it."""
    total = sums.cells * steps
    squares = total.square() / max(sums.units, 1) + total + sums.outward_squares
    chance = (2 * evidence * squares).sqrt() + _DEVIATIONS * (total + sums.outward_squares).sqrt()
    return total > chance + sums.leaning + leaning_of_a_constant(sums.cells)


def _half_of_first(is_reported: Tensor) -> float:
    """Half the smallest effect from which on all are reported; infinite if none is."""
    missed = (~is_reported).nonzero()[:, 0]
    first = int(missed[-1]) + 1 if len(missed) else 0
    return float(_GRID[first]) / 2 if first < len(_GRID) else math.inf

"""The smallest effects that a run's comparisons would have shown, by what the effect takes in.

An effect is a factor of 1 + e on everything it takes in, in front of the store. At twice the stated
e at least 95 of 100 such effects are reported, wherever they are; ``benchmarks/visible_effects.py``
injects them and counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.arithmetic import FP32_ROUNDOFF
from moe.formats import Stage
from reports.verdict.distribution import evidence_needed
from reports.verdict.ledger import Ledger
from reports.verdict.tallies import Kind, Sums, Tally

SHARE_REPORTED: Final = 0.98
"""Aimed at in the sample, so that 95 of 100 are reported whatever its own error."""

_GRID: Final = FP32_ROUNDOFF * 2 ** torch.arange(0, 30, 0.25, dtype=torch.float64)
"""Effects that are tried, from the smallest that fp32 can hold."""

_ROWS: Final = 64
"""Of a tensor, that they are tried on."""

_DEVIATIONS: Final = 2.0
"""Standard deviations that a number stays above with more than ``SHARE_REPORTED``."""


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
    samples = _samples(tally)
    has_cells = samples[0].isfinite().any(1)  # a row of padding, or of zeros, has nothing to show
    if not bool(has_cells.any()):
        return NOTHING_SEEN
    up, down, step_up, step_down = (sample[has_cells] for sample in samples)
    shown, steps = (_share(up) + _share(down)) / 2, (_share(step_up) + _share(step_down)) / 2
    live = up.isfinite().double().mean()
    sure = shown * _certainty(shown, up.shape[1])
    by_kind: dict[Kind, float] = {}
    by_row = steps.mean(0), steps.std(0, correction=0)
    missed = cache(partial(_row_missed, sure))
    for group, sums in tally.sums.items():
        rows, width = tally.shape_of(group)
        is_reported = missed(width) ** rows <= 1 - SHARE_REPORTED
        if tally.signs_are_drawn:
            is_reported |= _leans(sums, by_row, (rows, width), evidence)
        effect = _half_of_first(is_reported)
        by_kind[group.kind] = max(effect, by_kind.get(group.kind, 0.0))
    return Sight(
        cell=_half_of_first(shown.mean(0) >= SHARE_REPORTED * live),
        row=_half_of_first(missed(tally.columns) <= 1 - SHARE_REPORTED),
        by_kind=by_kind,
    )


def _samples(tally: Tally) -> list[Tensor]:
    """Four [R, S] of ``Sample``, of a few rows of every comparison; on the CPU, as they are few."""
    samples = [sample for sample in tally.samples if sample.up.numel()]
    every = -(-sum(len(sample.up) for sample in samples) // _ROWS) or 1
    if not samples:
        return [torch.zeros(0, 0, dtype=torch.float64)] * 4
    of_all = [(sample.up, sample.down, sample.step_up, sample.step_down) for sample in samples]
    return [torch.cat(parts)[::every].cpu() for parts in zip(*of_all, strict=True)]


def _share(gains: Tensor) -> Tensor:
    """[R, effects] share of each row's cells that show an effect: [R, S] the gains they show."""
    first_above = torch.bucketize(gains, _GRID, right=True)  # the smallest effect that shows it
    showing = gains.new_zeros((len(gains), len(_GRID) + 1), dtype=torch.int64)
    showing.scatter_add_(1, first_above, torch.ones_like(first_above))
    return showing[:, :-1].cumsum(1) / gains.shape[1]


def _certainty(shown: Tensor, columns: int) -> Tensor:
    """[effects] what is left of a share once the sample's own chance is taken off: few show it."""
    found = shown.sum(0) * columns
    return (1 - _DEVIATIONS / found.sqrt()).clamp(min=0)


def _row_missed(shown: Tensor, width: int) -> Tensor:
    """[effects] probability that no cell of a row with so many cells shows an effect."""
    return ((1 - shown) ** width).mean(0)


def _leans(
    sums: Sums, by_row: tuple[Tensor, Tensor], shape: tuple[int, int], evidence: float
) -> Tensor:
    """[effects] bool: those whose steps in a group exceed what is allowed to it.

    ``by_row``: mean and standard deviation over rows of the share of cells that step.
    """
    (rows, width), (mean, spread) = shape, by_row
    cells, a_unit = rows * width, sums.cells / max(sums.units, 1)
    total = cells * (mean - _DEVIATIONS * spread / math.sqrt(max(rows, 1)))
    squares = cells * a_unit * (mean**2 + spread**2) + cells * mean + sums.outward_squares
    chance = (2 * evidence * squares).sqrt() + _DEVIATIONS * (cells * mean).sqrt()
    return total > chance


def _half_of_first(is_reported: Tensor) -> float:
    """Half the smallest effect from which on all are reported; infinite if none is."""
    missed = (~is_reported).nonzero()[:, 0]
    first = int(missed[-1]) + 1 if len(missed) else 0
    return float(_GRID[first]) / 2 if first < len(_GRID) else math.inf

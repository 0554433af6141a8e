"""Values stored as bf16 are step functions of what was stored: one value, or one of two.

A band as wide as the store's own rounding holds two values for every cell. The golden knows the
number in front of the store, so most cells have one legal value; only next to a rounding boundary,
within the declared noise, there are two. What is left of the error, a step up or down in the cells
next to a boundary, is free of the store's rounding. Behind a sum of many roundings to nearest it
has no preferred sign, and is counted.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import round_bf16
from reports.verdict.band import BF16_SMALLEST, stored_bf16
from reports.verdict.cells import all_finite, error_over_band
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from reports.verdict.tallies import Sample, Steps, Tally

STORES: Final = "band: stores"

SAMPLED_ROWS, SAMPLED_COLUMNS = 32, 256
"""Of each comparison, that the smallest visible effects are taken from."""

_BITS_OF_EXPONENT: Final = 0x7FF0000000000000

_BITS_BELOW_BF16: Final = 45
"""Of a float64's mantissa, that a bf16 value has no use for."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredCells:
    """Cells of N rows, [N, C] each.

    got    float64, as stored
    want   float64, the golden's in front of the store
    noise  float64, largest error declared in front of the store
    signs_are_drawn  errors in front of the store have signs that nothing has in common
    """

    got: Tensor
    want: Tensor
    noise: Tensor
    signs_are_drawn: bool


def check_stores(ledger: Ledger, stage: Stage, tensor: str, rows: Rows, cells: StoredCells) -> None:
    """Hold stored values against those that the golden's may be stored as, and count the steps.

    A rank with a cell outside its band is the band's to report.

    Args:
        ledger: takes the findings.
        stage: where the store is.
        tensor: name in the trace.
        rows: coordinates of the cells' rows.
        cells: what is compared.
    """
    got, due = cells.got, round_bf16(cells.want)
    differs, same_numbers = got != due, True
    if not (all_finite(got) and all_finite(due)):
        finite, due_finite = got.isfinite(), due.isfinite()
        differs &= finite & due_finite
        same_numbers = bool((finite == due_finite).all())
    row, column = differs.nonzero(as_tuple=True)
    here = got[row, column], cells.want[row, column], cells.noise[row, column]
    within = error_over_band(here[0], here[1], stored_bf16(here[1], here[2])) <= 1
    possible = could_be_stored(*here)
    reported = torch.isin(rows.rank, rows.rank[row[~within]])
    fits = torch.ones_like(differs)
    fits[row, column] = possible | reported[row]
    ledger.steps(STORES, stage, tensor, rows, got=got, want=due, legal=fits)
    tally = ledger.tally(stage, tensor, got.shape[1], stored=True, drawn=cells.signs_are_drawn)
    tally.spoiled |= not (same_numbers and bool((possible & within).all()))
    tally.count(rows)
    if cells.signs_are_drawn:
        bounded = here[2].isfinite()
        tally.add(rows, _steps(got, due, row[bounded], column[bounded]))
    note_sample(tally, cells.want, cells.noise, stored=True)


def could_be_stored(got: Tensor, want: Tensor, noise: Tensor) -> Tensor:
    """[...] bool: values that a store to nearest makes of some value within noise of ``want``."""
    noise = noise + BF16_SMALLEST
    return (got >= round_bf16(want - noise)) & (got <= round_bf16(want + noise))


def note_sample(tally: Tally, want: Tensor, noise: Tensor, *, stored: bool) -> None:
    """Keep which gains some cells would show, of rows and columns evenly spread.

    Args:
        tally: keeps it.
        want: [N, C] float64, the golden's.
        noise: [N, C] float64, declared in front of a store; the band of what is kept.
        stored: as bf16; otherwise fp32 is kept.
    """
    rows, columns = (
        slice(None, None, -(-size // limit))
        for size, limit in zip(want.shape, (SAMPLED_ROWS, SAMPLED_COLUMNS), strict=True)
    )
    want, noise = want[rows, columns], noise[rows, columns]
    size = want.abs().nan_to_num_(nan=0.0, posinf=0.0)
    if stored:
        due = round_bf16(size)
        noisy = round_bf16(size - noise), round_bf16(size + noise)
        moves = [_to_boundary(size, *noisy), _to_boundary(size, due, due)]
    else:
        moves = [(2 * noise, 2 * noise), (torch.full_like(size, torch.inf),) * 2]
    gains = [move.div(size) for pair in moves for move in pair]
    nothing = size == 0
    tally.samples.append(Sample(*(gain.masked_fill_(nothing, torch.inf) for gain in gains)))


def _to_boundary(size: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """By how much a value has to grow, or shrink, to be stored beyond both of these."""
    return high + step_of(high) / 2 - size, size - low + step_of(low) / 2


def step_of(want: Tensor) -> Tensor:
    """[...] distance of neighbouring bf16 values around each value."""
    power = (want.contiguous().view(torch.int64) & _BITS_OF_EXPONENT).view(torch.float64)
    return power.mul_(2.0**-7).clamp_(min=BF16_SMALLEST)


def _steps(got: Tensor, due: Tensor, row: Tensor, column: Tensor) -> Steps:
    upward = (got[row, column] - due[row, column]).sign()
    with_steps, place = torch.unique(row, return_inverse=True)
    return Steps(
        row=row,
        column=column,
        upward=upward,
        outward=upward * due[row, column].sign(),
        row_keys=row_keys(got[with_steps])[place],
    )


def row_keys(values: Tensor) -> Tensor:
    """[N] int64, equal for equal rows of [N, C] float64 values of bf16, and hardly for others."""
    generator = torch.Generator().manual_seed(values.shape[1])
    limits = torch.iinfo(torch.int64)
    marks = torch.randint(
        limits.min, limits.max, (values.shape[1],), generator=generator, device="cpu"
    )
    marks = marks.to(values.device)
    bits = values.contiguous().view(torch.int64) >> _BITS_BELOW_BF16
    return (bits * marks.to(bits.device)).sum(1)  # modulo 2^64, so in any order

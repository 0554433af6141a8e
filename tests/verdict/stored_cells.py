"""Drawn cells of a store: what is in front of it, and what a run with a small mistake stores."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.compared import check_stored
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows

COLUMNS = 512
RANKS, EXPERTS = 4, 8
ROWS_A_RANK = 48
DECLARED = 2.0**-13
"""Largest relative error in front of the store."""

TYPICAL = 2.0**-17
"""Standard deviation of the one that the run makes."""


def to_nearest(values: Tensor) -> Tensor:
    """As torch stores bf16, through fp32."""
    return values.to(torch.bfloat16).to(torch.float64)


def towards_zero(values: Tensor) -> Tensor:
    """bf16 with its last sixteen bits of fp32 cut off."""
    bits = values.to(torch.float32).view(torch.int32) & -65536
    return bits.view(torch.float32).to(torch.float64)


def some_rows() -> Rows:
    """Rows of ranks in turn; experts by rank, two each."""
    place = torch.arange(RANKS * ROWS_A_RANK)
    rank = place % RANKS
    expert = 2 * rank + (place // RANKS) % 2
    return Rows(rank=rank, token=place, slot=torch.zeros_like(place), expert=expert)


def drawn(seed: int, rows: int = RANKS * ROWS_A_RANK) -> Tensor:
    """[rows, COLUMNS] float64 values of a sum."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, COLUMNS, dtype=torch.float64, generator=generator)


def judged(
    seed: int,
    mistake: Callable[[Tensor], Tensor] = lambda values: values,
    store: Callable[[Tensor], Tensor] = to_nearest,
    want: Tensor | None = None,
    *,
    drawn_signs: bool = True,
) -> Ledger:
    """What the checks find of one tensor.

    Args:
        seed: of the values and their errors.
        mistake: what the run does to the values in front of the store.
        store: how it stores them.
        want: the values, instead of drawn ones.
        drawn_signs: nothing has the signs of errors in common.
    """
    want, ledger = drawn(seed) if want is None else want, Ledger()
    generator = torch.Generator().manual_seed(seed + 1)
    error = TYPICAL * torch.randn(want.shape, dtype=torch.float64, generator=generator)
    noise = DECLARED * want.abs()
    got = store(mistake(want * (1 + error)))
    check_stored(
        ledger,
        Stage.GEMM2,
        "output",
        some_rows()[: len(want)],
        got=got,
        want=want,
        noise=noise,
        signs_are_drawn=drawn_signs,
    )
    return ledger

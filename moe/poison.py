"""Fills rows that nobody may read with values that nobody can miss."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

E4M3_NAN_CODE = 0x7F
E4M3_LARGEST_CODE = 0x7E


class Fill(StrEnum):
    """What nobody may read; two fills show a read that one of them would not."""

    NAN = "nan"
    """NaN, or the largest value of an integer dtype: what reads it mostly becomes NaN, too."""

    LARGE = "large"
    """A large number, or the smallest value of an integer dtype: a maximum does not swallow it."""


_fill: Final = ContextVar("fill", default=Fill.NAN)


@contextmanager
def filled_with(fill: Fill) -> Iterator[None]:
    """Inside, ``poison`` means this fill."""
    token = _fill.set(fill)
    try:
        yield
    finally:
        _fill.reset(token)


def poison(rows: Tensor) -> Tensor:
    """Overwrite ``rows`` in place with the fill in force."""
    large = _fill.get() is Fill.LARGE
    if rows.dtype == torch.float8_e4m3fn:
        rows.view(torch.uint8).fill_(E4M3_LARGEST_CODE if large else E4M3_NAN_CODE)
    elif rows.dtype.is_floating_point:
        rows.fill_(torch.finfo(rows.dtype).max / 2 if large else torch.nan)
    else:
        limits = torch.iinfo(rows.dtype)
        rows.fill_(limits.min if large else limits.max)
    return rows

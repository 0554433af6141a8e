"""How much it takes to hit a value by luck: told from how often due values are like it."""

from typing import Final

import torch
from torch import Tensor

SAMPLE: Final = 512
"""Cells that stand for all; a chance below one in so many is not told from it."""


def bits_of_cells(hit: Tensor, due: Tensor, band: Tensor) -> float:
    """Bits that hitting all of some values takes, for values that stand in place of the due ones.

    A value is as likely as due values of the same tensor are within their band of it. So zeros,
    codes and exponents that are everywhere prove little, and no cell proves more than the sample is
    large.

    Args:
        hit: [n] float64, what a prediction had to hit.
        due: [N, C] float64, all values that are due.
        band: [N, C] float64, the largest error allowed.
    """
    if not len(hit) or not due.numel():
        return 0.0
    at = _sample(due.numel())
    values, widths = due.flatten()[at], band.flatten()[at]
    some = hit[_sample(len(hit))][:, None]
    alike = ((some - values).abs() <= widths) | (some == values)
    alike |= some.isnan() & values.isnan()
    chance = (alike.sum(1) + 1) / (len(at) + 1)
    return float(-chance.log2().mean()) * len(hit)


def _sample(count: int) -> Tensor:
    """[<= SAMPLE] numbers below ``count``, in odd steps, so that they meet every column."""
    step = -(-count // SAMPLE)
    return torch.arange(0, count, step + (step > 1 and step % 2 == 0))

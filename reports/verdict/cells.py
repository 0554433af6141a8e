"""The error of cells against the band that bounds it."""

import torch
from torch import Tensor


def error_over_band(got: Tensor, want: Tensor, band: Tensor) -> Tensor:
    """|got - want| / band; infinite where only one of them is a number.

    0 where both are equal, where neither is a finite number and one is none at all (an infinity
    that met another, in another order of operations), and under an infinite band: what may
    overflow may become anything.
    """
    ratio = (got - want).abs_().div_(band)
    if bool(ratio.isfinite().all()):
        return ratio
    neither_finite = ~got.isfinite() & ~want.isfinite()
    same = (
        (got == want)
        | (neither_finite & (got.isnan() | want.isnan()))
        | (band.isinf() & want.isfinite())
    )
    return ratio.nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(same, 0.0)

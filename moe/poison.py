"""Fills rows that nobody may read with values that nobody can miss."""

import torch
from torch import Tensor

E4M3_NAN_CODE = 0x7F


def poison(rows: Tensor) -> Tensor:
    """Overwrite ``rows`` in place with NaN, or with the extreme value of an integer dtype."""
    if rows.dtype == torch.float8_e4m3fn:
        rows.view(torch.uint8).fill_(E4M3_NAN_CODE)
    elif rows.dtype.is_floating_point:
        rows.fill_(torch.nan)
    else:
        rows.fill_(torch.iinfo(rows.dtype).max)
    return rows

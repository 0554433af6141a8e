"""float64 values kept in fewer bytes, where not one of them changes."""

import torch
from torch import Tensor


def narrowest(values: Tensor) -> Tensor:
    """float64 values in the first of bf16, fp32 and float64 that has them all; others as given."""
    if values.dtype is not torch.float64:
        return values
    for dtype in (torch.bfloat16, torch.float32):
        narrow = values.to(dtype)
        same = narrow.to(torch.float64)
        if torch.equal(same, values) or torch.equal(
            same.nan_to_num_(nan=0.0), values.nan_to_num(nan=0.0)
        ):
            return narrow
    return values

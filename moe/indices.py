"""Index arithmetic of the grouped layouts and nothing else."""

import torch
from torch import Tensor


def ceil_div(count: int, size: int) -> int:
    """Number of ``size``-wide pieces that hold ``count``."""
    return -(-count // size)


def align(count: int, alignment: int) -> int:
    """``count`` rounded up to a multiple of ``alignment``."""
    return ceil_div(count, alignment) * alignment


def align_counts(counts: Tensor, alignment: int) -> Tensor:
    """[L] counts, each rounded up to a multiple of ``alignment``."""
    return (counts + alignment - 1) // alignment * alignment


def exclusive_psum(counts: Tensor) -> Tensor:
    """[L] integer: entry i is the sum of the entries before i."""
    return counts.cumsum(0) - counts


def m_indices_from_counts(counts: Tensor) -> Tensor:
    """Expert of every row when segments of ``counts[i]`` rows lie end to end.

    Args:
        counts: [L] rows of each local expert, padding included.

    Returns:
        [sum(counts)] int32
    """
    experts = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device)
    return experts.repeat_interleave(counts)


def rank_within_value(values: Tensor) -> Tensor:
    """How many equal values stand before each entry: the arrival number inside a segment.

    Args:
        values: [N] non-negative integers.

    Returns:
        [N] int64
    """
    order = torch.argsort(values, stable=True)
    starts = exclusive_psum(torch.bincount(values)) if values.numel() else values
    arrival = torch.empty_like(order)
    arrival[order] = torch.arange(order.shape[0], device=order.device) - starts[values[order]]
    return arrival

"""Index arithmetic of the grouped layouts and nothing else."""

import torch
from torch import Tensor

from topology.splits import align as align


def ceil_div(count: int, size: int) -> int:
    """Number of ``size``-wide pieces that hold ``count``."""
    return -(-count // size)


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


def compact_row_bound(num_routes: int, num_local_experts: int, alignment: int) -> int:
    """Rows that aligned segments of ``num_routes`` rows fill at most, however they are routed.

    Each expert with a row wastes at most ``alignment - 1``; the worst case gives a row to as many
    experts as there are.

    Args:
        num_routes: slots of all tokens, dropped ones and those of other ranks included.
        num_local_experts: L.
        alignment: rows.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_get_compact_all_tokens.
    """
    with_a_row = min(num_routes, num_local_experts)
    return alignment * (with_a_row + (num_routes - with_a_row) // alignment)


def pad_expert_counts(counts: Tensor, alignment: int, num_rows: int) -> Tensor:
    """[L] segment lengths that fill ``num_rows`` exactly: aligned, the last takes up the slack.

    Args:
        counts: [L] rows of each local expert.
        alignment: rows.
        num_rows: at least the sum of the aligned counts.

    Source: SGLang 0.5.21, ep_moe/kernels.py::pad_expert_counts.
    """
    padded = align_counts(counts, alignment)
    padded[-1] += num_rows - padded.sum()
    return padded


SLAB_STEP = 256


def slab_height(num_tokens: int) -> int:
    """Rows of each expert's slab: more than ``num_tokens``, in steps of 256, so 512 for 256.

    Source: SGLang 0.5.21, ep_moe/kernels.py::moe_ep_deepgemm_preprocess.
    """
    return (num_tokens // SLAB_STEP + 1) * SLAB_STEP


def slab_rows(masked_m: Tensor, height: int) -> Tensor:
    """The real rows of all slabs, counted over all slabs: ``expert * height + row``, ascending.

    Args:
        masked_m: [L] integer, real rows of each slab.
        height: S, rows of a slab.

    Returns:
        [sum(masked_m)] int64
    """
    row = torch.arange(height, device=masked_m.device)
    return (row < masked_m[:, None]).flatten().nonzero()[:, 0]


def arrival_numbers(experts: Tensor, seed: int) -> Tensor:
    """``rank_within_value`` in an order that ``seed`` draws, as if atomics had decided it.

    Args:
        experts: [N] non-negative integers.
        seed: of the order.

    Returns:
        [N] int64
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(experts.shape[0], generator=generator)
    arrival = torch.empty_like(order)
    arrival[order] = rank_within_value(experts[order])
    return arrival


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

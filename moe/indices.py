"""Index arithmetic of the grouped layouts and nothing else."""

import torch
from torch import Tensor

from moe.row_counts import capped_slab_height as capped_slab_height
from moe.row_counts import ceil_div as ceil_div
from moe.row_counts import compact_row_bound as compact_row_bound
from moe.row_counts import slab_height as slab_height
from moe.row_counts import wide_row_bound as wide_row_bound
from topology.splits import align as align


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


def local_ids(physical_ids: Tensor, first: int, num_local_experts: int) -> Tensor:
    """Expert slots as their rank counts them, in the same shape and dtype.

    Args:
        physical_ids: integers, slots over all ranks; -1 = dropped.
        first: the rank's first slot, 0 or more.
        num_local_experts: L, how many it has from there on.

    Returns:
        0 to L - 1; -1 for slots of other ranks and for dropped routes.
    """
    local = physical_ids - first
    is_here = (local >= 0) & (local < num_local_experts)  # never of a dropped -1
    return local.masked_fill(~is_here, -1)


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


def drawn_order(length: int, seed: int, device: torch.device) -> Tensor:
    """[length] int64, a permutation; drawn on the CPU, so that every device has the same one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(length, generator=generator, device="cpu").to(device)


def arrival_numbers(experts: Tensor, seed: int) -> Tensor:
    """``rank_within_value`` in an order that ``seed`` draws, as if atomics had decided it.

    Args:
        experts: [N] non-negative integers.
        seed: of the order.

    Returns:
        [N] int64
    """
    order = drawn_order(experts.shape[0], seed, experts.device)
    arrival = torch.empty_like(order)
    arrival[order] = rank_within_value(experts[order])
    return arrival


def scatter_index(topk_ids: Tensor, rows_per_expert: Tensor, seed: int) -> Tensor:
    """Grouped row of every route, in a drawn order inside each expert's segment.

    Args:
        topk_ids: [R, K] int32 or int64 local experts; anything outside [0, L) is no route.
        rows_per_expert: [L] int64 segment lengths, or L times the height of slabs.
        seed: of that order.

    Returns:
        [R, K] of the same dtype, -1 where there is no route; of slabs ``expert * height + row``.
    """
    is_route = (topk_ids >= 0) & (topk_ids < rows_per_expert.shape[0])
    experts = topk_ids[is_route].to(torch.int64)
    output_index = torch.full_like(topk_ids, -1)
    starts = exclusive_psum(rows_per_expert)
    places = starts[experts] + arrival_numbers(experts, seed)
    output_index[is_route] = places.to(output_index.dtype)
    return output_index


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

"""Sums over routes and ranks, in a written order with an fp32 accumulator."""

from collections.abc import Iterable

import torch
from torch import Tensor


def ordered_sum(terms: Iterable[Tensor], like: Tensor) -> Tensor:
    """fp32 sum of [T, H] terms in the order given, starting from zero.

    Args:
        terms: any number of float tensors of ``like``'s shape.
        like: gives shape and device.
    """
    total = torch.zeros_like(like, dtype=torch.float32)
    for term in terms:
        total += term.to(torch.float32)
    return total


def fold_topk_weights(rows_RKH: Tensor, topk_weights: Tensor, is_route: Tensor) -> Tensor:
    """Weighted sum over the slots of a token, ascending, one rounding to bf16.

    Args:
        rows_RKH: [R, K, H] bf16; slots that are no route may hold anything, NaN included.
        topk_weights: [R, K] fp32.
        is_route: [R, K] bool.

    Returns:
        [R, H] bf16; zero for a token without a route.

    Source: SGLang 0.5.21, ep_gather.
    """
    rows = rows_RKH.masked_fill(~is_route[..., None], 0).to(torch.float32)
    weights = topk_weights.masked_fill(~is_route, 0)
    terms = (rows[:, k] * weights[:, k, None] for k in range(rows.shape[1]))
    return ordered_sum(terms, like=rows[:, 0]).to(torch.bfloat16)

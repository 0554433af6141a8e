"""Sums over routes, in a written order with an fp32 accumulator."""

import torch
from torch import Tensor


def fold_topk_weights(
    rows: Tensor, output_index: Tensor, topk_weights: Tensor, is_route: Tensor
) -> Tensor:
    """Weighted sum over the slots of a token, ascending, one rounding to bf16.

    Args:
        rows: [M, H] bf16 grouped rows; those that no route names may hold anything, NaN included.
        output_index: [R, K] int64 grouped row of each route.
        topk_weights: [R, K] fp32.
        is_route: [R, K] bool; other slots are not looked at.

    Returns:
        [R, H] bf16; zero for a token without a route.

    Source: SGLang 0.5.21, ep_gather.
    """
    total = rows.new_zeros((output_index.shape[0], rows.shape[1]), dtype=torch.float32)
    for slot in range(output_index.shape[1]):
        tokens = is_route[:, slot].nonzero()[:, 0]
        terms = rows[output_index[tokens, slot]].to(torch.float32)
        total.index_add_(0, tokens, terms.mul_(topk_weights[tokens, slot, None]))
    return total.to(torch.bfloat16)

"""Sums over routes, in a written order with an fp32 accumulator."""

import torch
from torch import Tensor

from moe.rows import take_rows


def fold_topk_weights(
    rows: Tensor,
    output_index: Tensor,
    topk_weights: Tensor,
    is_route: Tensor,
    factor: float = 1.0,
) -> Tensor:
    """Weighted sum over the slots of a token, ascending, times ``factor``, one rounding to bf16.

    Args:
        rows: [M, H] bf16 grouped rows; those that no route names may hold anything, NaN included.
        output_index: [R, K] int64 or int32 grouped row of each route.
        topk_weights: [R, K] fp32.
        is_route: [R, K] bool; other slots are not looked at.
        factor: the routed scaling factor where it is folded in here.

    Returns:
        [R, H] bf16; zero for a token without a route.

    Source: SGLang 0.5.21, ep_gather, without a factor; post_reorder_deepgemm, with it.
    """
    total = rows.new_zeros((output_index.shape[0], rows.shape[1]), dtype=torch.float32)
    token, slot = is_route.nonzero(as_tuple=True)  # token after token, slots ascending
    places = output_index[token, slot] % rows.shape[0]  # as upstream, -1 is not looked for
    terms = take_rows(rows, places).to(torch.float32)
    terms.mul_(topk_weights[token, slot, None])
    return total.index_add_(0, token, terms).mul_(factor).to(torch.bfloat16)

"""Sums over the ranks with their bf16 stores; ranks come one by one, so memory is bounded."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class RankSums:
    """What the ranks' weighted sums add up to, with the shared expert where ranks add that, too.

    Args:
        like: [T, H], the shape and device of the sums.
        store: the rounding of whatever a rank stores.
        factor: multiplies every rank's weighted sum before it is stored.
        shared_parts: [T, H] each, stored: one for each of the first ranks; None: no rank has any.
        scales_stored_sum: the sum is stored in front of the factor, too.

    Attributes:
        routed: [T, H] sum of the stored weighted sums.
        shared: [T, H] sum of the shared expert's parts.
        total: [T, H] sum of what the ranks give: both of them, stored once more where both are.
    """

    def __init__(
        self,
        like: Tensor,
        store: Callable[[Tensor], Tensor],
        factor: float,
        shared_parts: Iterator[Tensor] | None,
        *,
        scales_stored_sum: bool = False,
    ) -> None:
        self._store = store
        self._factor = factor
        self._shared_parts = shared_parts
        self._scales_stored_sum = scales_stored_sum
        self.routed = torch.zeros_like(like)
        self.shared = torch.zeros_like(like)
        self.total = self.routed if shared_parts is None else torch.zeros_like(like)

    def add_rank(self, tokens: Tensor, weighted_sum: Tensor) -> None:
        """The next rank's weighted sum [N, H] of its routes of [N] distinct tokens."""
        summed = self._store(weighted_sum) if self._scales_stored_sum else weighted_sum
        stored = self._store(self._factor * summed)
        self.routed.index_add_(0, tokens, stored)
        if self._shared_parts is None:
            return
        part = next(self._shared_parts, None)
        if part is None:
            self.total.index_add_(0, tokens, stored)
            return
        summand = part.clone()
        summand[tokens] = self._store(stored + part[tokens])
        self.shared += part
        self.total += summand

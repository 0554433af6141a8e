"""Memory that a dispatcher keeps from one forward to the next."""

import torch
from torch import Tensor

from moe.poison import poison


class MessageBuffers:
    """Receive buffers of one rank, taken in turn; a use finds what an earlier one left there.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._buffers: list[Tensor | None] = [None] * count
        self._next = 0

    def take(self, num_rows: int, row_bytes: int) -> Tensor:
        """The next buffer, [num_rows, row_bytes] uint8: as it was left, or poison if it is new."""
        held = self._buffers[self._next]
        if held is None or held.shape != (num_rows, row_bytes):
            held = poison(torch.empty((num_rows, row_bytes), dtype=torch.uint8))
            self._buffers[self._next] = held
        self._next = (self._next + 1) % len(self._buffers)
        return held

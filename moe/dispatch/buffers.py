"""Memory that a dispatcher keeps from one forward to the next."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.devices import CPU
from moe.poison import poison

_COUNT_BYTES: Final = 8


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chunks:
    """A receive buffer with a chunk of places for each sender: views of memory that stays.

    counts  [*, *]    int64  messages in each chunk
    rows    [N, B]    uint8  the messages, B bytes each, chunk after chunk
    """

    counts: Tensor
    rows: Tensor


class MessageBuffers:
    """Receive buffers of one rank, taken in turn; a use finds what an earlier one left there.

    Args:
        count: how many there are.
        device: where they lie.
    """

    def __init__(self, count: int, device: torch.device = CPU) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None] * count
        self._next = 0

    def take(self, num_rows: int, row_bytes: int) -> Tensor:
        """The next buffer, [num_rows, row_bytes] uint8: as it was left, or poison if it is new."""
        held = self._buffers[self._next]
        if held is None or held.shape != (num_rows, row_bytes):
            shape = (num_rows, row_bytes)
            held = poison(torch.empty(shape, dtype=torch.uint8, device=self._device))
            self._buffers[self._next] = held
        self._next = (self._next + 1) % len(self._buffers)
        return held

    def take_chunks(self, shape: tuple[int, int], height: int, row_bytes: int) -> Chunks:
        """The next buffer, counts in front of the chunks; as it was left, or poison if it is new.

        Args:
            shape: chunks along two axes, such as experts and senders.
            height: rows that a chunk has room for.
            row_bytes: B.
        """
        num_chunks = shape[0] * shape[1]
        counted = num_chunks * _COUNT_BYTES
        memory = self.take(1, counted + num_chunks * height * row_bytes)[0]
        return Chunks(
            counts=memory[:counted].view(torch.int64).view(shape),
            rows=memory[counted:].view(num_chunks * height, row_bytes),
        )

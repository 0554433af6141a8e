"""Canonical coordinates of rows, and moves of rows of any dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows:
    """Canonical coordinates of N rows; -1 where an axis does not apply.

    rank, token, slot, expert  [N] int64
    """

    rank: Tensor
    token: Tensor
    slot: Tensor
    expert: Tensor

    @staticmethod
    def of_rank(rank: int, num_rows: int, token: Tensor | None = None) -> "Rows":
        """Rows of one rank, with their global tokens where they have any."""
        none = torch.full((num_rows,), -1)
        return Rows(
            rank=torch.full((num_rows,), rank),
            token=none if token is None else token,
            slot=none,
            expert=none,
        )

    @staticmethod
    def cat(parts: Sequence["Rows"]) -> "Rows":
        """All rows of several parts."""
        return Rows(
            rank=torch.cat([part.rank for part in parts]),
            token=torch.cat([part.token for part in parts]),
            slot=torch.cat([part.slot for part in parts]),
            expert=torch.cat([part.expert for part in parts]),
        )

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(
            rank=self.rank[index],
            token=self.token[index],
            slot=self.slot[index],
            expert=self.expert[index],
        )

    def __len__(self) -> int:
        return self.rank.shape[0]


def distinct(values: Tensor) -> list[int]:
    """The different entries of a non-negative integer tensor, ascending."""
    found: list[int] = torch.bincount(values).nonzero()[:, 0].tolist()
    return found


def take_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]`` for any dtype; float8 has no indexing of its own."""
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)
    return tensor.index_select(0, index)


def cat_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors, row-major; float8 travels as bytes, mixed dtypes become float64."""
    dtype = tensors[0].dtype
    if any(tensor.dtype != dtype for tensor in tensors):
        return torch.cat([tensor.to(torch.float64) for tensor in tensors])
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)
    return torch.cat(list(tensors))

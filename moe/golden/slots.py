"""What a golden forward keeps of its routes, in as few bytes as the caller wants."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe.golden.mlp import MlpRows

Keep = Callable[[Tensor], Tensor]


def all_of_it(rows: Tensor) -> Tensor:
    """Rows as they are."""
    return rows


class _RouteRows:
    """One value of every route, [T * K, C], entered expert by expert; zeros where none is.

    Args:
        num_routes: T * K.
        width: C.
        keep: what is kept of some rows; the room takes the widest dtype of them.
        like: dtype and device of what is entered.
    """

    def __init__(self, num_routes: int, width: int, keep: Keep, like: Tensor) -> None:
        self._keep = keep
        self._room = keep(like.new_zeros(0, width)).new_zeros(num_routes, width)

    def enter(self, positions: Tensor, rows: Tensor) -> None:
        """Rows [N, C] at their positions."""
        kept = self._keep(rows)
        dtype = torch.promote_types(self._room.dtype, kept.dtype)
        self._room = self._room.to(dtype)
        self._room[positions] = kept.to(dtype)

    def of(self, ids: Tensor) -> Tensor:
        """[T, K, C] of routes [T, K]."""
        return self._room.view(*ids.shape, self._room.shape[1])


class Slots:
    """What became of every route: gate_up [T * K, 2I], activation [T * K, I], output [T * K, H]."""

    def __init__(self, num_routes: int, width: int, keep: Keep, like: Tensor) -> None:
        self.gate_up = _RouteRows(num_routes, 2 * width, keep, like)
        self.activation = _RouteRows(num_routes, width, keep, like)
        self.output = _RouteRows(num_routes, like.shape[1], keep, like)

    def enter(self, positions: Tensor, rows: MlpRows, outputs: Tensor) -> None:
        """Rows at their positions; ``outputs`` [P, R, H] are the shards'."""
        self.gate_up.enter(positions, rows.gate_up)
        self.activation.enter(positions, rows.activation)
        whole = outputs[0] if len(outputs) == 1 else outputs.sum(0)
        self.output.enter(positions, whole)

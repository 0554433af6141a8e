"""Grids of ranks: integers only, no process, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

Group = tuple[int, ...]
"""The ranks that take part in one collective, in group order."""


@dataclass(frozen=True, slots=True)
class ProcessMesh:
    """``prod(shape)`` ranks in row-major order over named axes.

    ``ProcessMesh(("dp", "tp"), (2, 4))`` puts rank 5 at dp 1, tp 1.

    Raises:
        ValueError: a degree under 1, or another number of names than of degrees.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{len(self.axes)} axis names for {len(self.shape)} degrees")
        if any(degree < 1 for degree in self.shape):
            raise ValueError(f"degrees must be at least 1, got {self.shape}")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    def degree(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return self.shape[self.axes.index(axis)]

    def coord(self, rank: int, axis: str) -> int:
        """Position of ``rank`` along ``axis``."""
        return rank // self._stride(axis) % self.degree(axis)

    def groups(self, axes: Sequence[str]) -> tuple[Group, ...]:
        """Groups that span ``axes`` and share all other coordinates; they partition the world.

        Raises:
            ValueError: the mesh has no such axis.
        """
        steps = self._steps(axes)
        firsts = self._steps(self._without(axes))
        return tuple(tuple(first + step for step in steps) for first in firsts)

    def group(self, rank: int, axes: Sequence[str]) -> Group:
        """The group of ``rank`` that spans ``axes``.

        Raises:
            ValueError: the mesh has no such axis or no such rank.
        """
        if rank not in range(self.size):
            raise ValueError(f"no rank {rank} in a mesh of {self.size}")
        first = sum(self.coord(rank, axis) * self._stride(axis) for axis in self._without(axes))
        return tuple(first + step for step in self._steps(axes))

    def _without(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes that are not among ``axes``."""
        unknown = [axis for axis in axes if axis not in self.axes]
        if unknown:
            raise ValueError(f"no axis {', '.join(unknown)} among {', '.join(self.axes)}")
        return tuple(axis for axis in self.axes if axis not in axes)

    def _steps(self, axes: Sequence[str]) -> list[int]:
        """Distance of each rank that differs from rank 0 in ``axes`` alone, ascending."""
        ranges = (
            range(0, self.degree(axis) * self._stride(axis), self._stride(axis))
            for axis in self.axes
            if axis in axes
        )
        return [sum(along) for along in product(*ranges)]

    def _stride(self, axis: str) -> int:
        """Distance of two neighbours along ``axis``."""
        return prod(self.shape[self.axes.index(axis) + 1 :])

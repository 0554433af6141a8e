"""What load-time preparation made of the weights, and what the recipe costs them: two numbers."""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from reports.verdict.weights import GoldenPreparation, Pair, StreamedWeights

SAMPLED_EXPERTS: Final = 4
"""At most so many experts are looked at, spread evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChange:
    """Relative Frobenius distances of one tensor, over the experts looked at.

    tensor       as in the trace
    changed_by   prepared weights against what the checkpoint stores
    from_ideal   prepared weights against the weights without any rounding of the recipe
    num_experts  how many were looked at
    has_scales   whether the matrices as they were read have scales
    """

    tensor: str
    changed_by: float
    from_ideal: float
    num_experts: int
    has_scales: bool


class _Distance:
    """Sums of squares over matrices that come one by one."""

    def __init__(self) -> None:
        self._error = self._size = 0.0

    def add(self, got: Tensor, want: Tensor) -> None:
        self._error += float((got - want).square_().sum())
        self._size += float(want.square().sum())

    @property
    def relative(self) -> float:
        return 0.0 if self._error == 0 else (self._error / max(self._size, 1e-300)) ** 0.5


class _Distances:
    """From what is stored, and from ideal; of w13 and w2 of experts that come one by one."""

    def __init__(self) -> None:
        self._of = {name: (_Distance(), _Distance()) for name in ("w13", "w2")}
        self._count = 0

    def add(self, prepared: Pair, stored: Pair, ideal: Pair) -> None:
        self._count += 1
        for (changed, from_ideal), matrix, *others in zip(
            self._of.values(), prepared, stored, ideal, strict=True
        ):
            changed.add(matrix, others[0])
            from_ideal.add(matrix, others[1])

    def changes(self, group: str, has_scales: bool) -> list[WeightChange]:
        """A row for w13 and one for w2."""
        return [
            WeightChange(
                tensor=f"{group}.{name}",
                changed_by=changed.relative,
                from_ideal=from_ideal.relative,
                num_experts=self._count,
                has_scales=has_scales,
            )
            for name, (changed, from_ideal) in self._of.items()
        ]


def weight_changes(
    preparation: GoldenPreparation,
    prepared: StreamedWeights,
    ideal: StreamedWeights,
    num_experts: int,
) -> list[WeightChange]:
    """Both distances of the routed experts' matrices, and of the shared expert's.

    Args:
        preparation: gives the checkpoint's values.
        prepared: what the GEMMs read.
        ideal: before any rounding of the recipe.
        num_experts: E.
    """
    routed = _Distances()
    for expert in range(0, num_experts, -(-num_experts // SAMPLED_EXPERTS)):
        routed.add(prepared.expert(expert), preparation.stored_expert(expert), ideal.expert(expert))
    changes = routed.changes("experts", preparation.has_scales(shared=False))
    shared = prepared.shared(), preparation.stored_shared(), ideal.shared()
    if shared[0] is not None and shared[1] is not None and shared[2] is not None:
        of_shared = _Distances()
        of_shared.add(shared[0], shared[1], shared[2])
        changes += of_shared.changes("shared", preparation.has_scales(shared=True))
    return changes

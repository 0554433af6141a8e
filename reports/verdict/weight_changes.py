"""What load-time preparation made of the weights, and what the recipe costs them: two numbers."""

from collections.abc import Iterable
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
        self._error += float((got - want).square().sum())
        self._size += float(want.square().sum())

    @property
    def relative(self) -> float:
        return 0.0 if self._error == 0 else (self._error / max(self._size, 1e-300)) ** 0.5


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
    step = -(-num_experts // SAMPLED_EXPERTS)
    changes = _changes(
        "experts",
        preparation.has_scales(shared=False),
        (
            (prepared.expert(expert), preparation.stored_expert(expert), ideal.expert(expert))
            for expert in range(0, num_experts, step)
        ),
    )
    shared = prepared.shared(), preparation.stored_shared(), ideal.shared()
    if shared[0] is not None and shared[1] is not None and shared[2] is not None:
        of_shared = preparation.has_scales(shared=True)
        changes += _changes("shared", of_shared, [(shared[0], shared[1], shared[2])])
    return changes


def _changes(
    group: str, has_scales: bool, experts: Iterable[tuple[Pair, Pair, Pair]]
) -> list[WeightChange]:
    """One row for w13 and one for w2 of (prepared, stored, ideal) pairs, an expert at a time."""
    sums = {name: (_Distance(), _Distance()) for name in ("w13", "w2")}
    count = 0
    for expert in experts:
        count += 1
        for (changed, from_ideal), *matrices in zip(sums.values(), *expert, strict=True):
            prepared, stored, ideal = matrices
            changed.add(prepared, stored)
            from_ideal.add(prepared, ideal)
    return [
        WeightChange(
            tensor=f"{group}.{name}",
            changed_by=changed.relative,
            from_ideal=from_ideal.relative,
            num_experts=count,
            has_scales=has_scales,
        )
        for name, (changed, from_ideal) in sums.items()
    ]

"""Weights without the rounding of their scales, and where preparation keeps to them."""

from dataclasses import dataclass, replace

from torch import Tensor

from moe.arithmetic import FP32_ROUNDOFF, compounded
from moe.formats import ScaleFormat
from reports.verdict.exact_sums import low_bit
from reports.verdict.weights import Pair, StreamedWeights

WEIGHT_SCALE_ROUNDINGS = 2
"""Of a checkpoint's fp32 scale: a quotient, and a product where scales are merged."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NominalMatrix:
    """A weight matrix without the rounding of its scales, and which rows are that up to it.

    value       [N, K] float64, as drawn or as the checkpoint has it
    quantum     [N] float64, divides every value of a row
    is_nominal  [N] bool, rows that preparation changes by the rounding of scales alone
    """

    value: Tensor
    quantum: Tensor
    is_nominal: Tensor

    @staticmethod
    def of(nominal: Tensor, prepared: Tensor, scale_format: ScaleFormat) -> "NominalMatrix":
        """Of a matrix [N, K] and the golden's preparation of it, for activations of a format."""
        rounding = 0.0
        if scale_format is ScaleFormat.FP32:
            rounding = compounded(WEIGHT_SCALE_ROUNDINGS, FP32_ROUNDOFF)
        return NominalMatrix(
            value=nominal,
            quantum=low_bit(nominal).amin(1),
            is_nominal=((prepared - nominal).abs() <= rounding * nominal.abs()).all(1),
        )

    def columns(self, part: slice) -> "NominalMatrix":
        """A shard of K; the quantum of whole rows divides its values, too."""
        return replace(self, value=self.value[:, part])

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return self.value.nbytes + self.quantum.nbytes + self.is_nominal.nbytes


NominalPair = tuple[NominalMatrix, NominalMatrix]

CACHED_BYTES = 1 << 28
"""A layer's nominal matrices are kept between forwards up to here, their float64 values included;
these are shared with the ideal weights while those are kept."""


class NominalWeights:
    """w13 and w2 of every expert, without the rounding of scales.

    Args:
        nominal: as drawn, or as the checkpoint has them.
        prepared: the golden's preparation.
        scale_format: of the activations they meet.
    """

    def __init__(
        self, nominal: StreamedWeights, prepared: StreamedWeights, scale_format: ScaleFormat
    ) -> None:
        self._nominal, self._prepared, self._scale_format = nominal, prepared, scale_format
        self._kept: dict[int, NominalPair] = {}
        self._kept_shared: NominalPair | None = None

    def expert(self, expert: int) -> NominalPair:
        """Both matrices of one routed expert; kept if all fit."""
        if expert in self._kept:
            return self._kept[expert]
        pair = self._pair(self._nominal.expert(expert), self._prepared.expert(expert))
        if self._has_room(pair):
            self._kept[expert] = pair
        return pair

    def _has_room(self, pair: NominalPair) -> bool:
        """For as many experts as there are."""
        num_experts = len(self._nominal.gate_weight)
        return num_experts * sum(matrix.nbytes for matrix in pair) <= CACHED_BYTES

    def shared(self) -> NominalPair | None:
        """Both matrices of the shared expert, or None; kept like the others."""
        if self._kept_shared is not None:
            return self._kept_shared
        nominal, prepared = self._nominal.shared(), self._prepared.shared()
        if nominal is None or prepared is None:
            return None
        pair = self._pair(nominal, prepared)
        if self._has_room(pair):
            self._kept_shared = pair
        return pair

    def _pair(self, nominal: Pair, prepared: Pair) -> NominalPair:
        w13, w2 = (
            NominalMatrix.of(one, other, self._scale_format)
            for one, other in zip(nominal, prepared, strict=True)
        )
        return w13, w2

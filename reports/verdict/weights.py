"""Weights in float64 for the golden: as drawn, or as the GEMMs of the recipe read them."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import requantize_weight
from moe.weights import ExpertMatrix, ExpertWeights, WeightSource
from reports.verdict.decode import codes_f64, spread_blocks

CACHED_BYTES = 1 << 30
"""float64 weights up to here are kept between forwards; the rest is decoded expert by expert."""

Pair = tuple[Tensor, Tensor]


class StreamedWeights:
    """See ``moe.golden.GoldenWeights``: hands experts out one at a time, keeps what fits.

    Args:
        gate_weight: [E, H].
        correction_bias: [E] or None.
        tid2eid: [V, K] experts of each vocabulary id, or None.
        intermediate_size: I of the routed experts.
        expert: logical expert -> (w13 [2I, H], w2 [H, I]) float64.
        shared: the same for the shared expert, or None.
    """

    def __init__(
        self,
        gate_weight: Tensor,
        correction_bias: Tensor | None,
        tid2eid: Tensor | None,
        intermediate_size: int,
        expert: Callable[[int], Pair],
        shared: Callable[[], Pair | None],
    ) -> None:
        self.gate_weight = gate_weight.to(torch.float64)
        self.correction_bias = (
            None if correction_bias is None else correction_bias.to(torch.float64)
        )
        self.tid2eid = tid2eid
        self.intermediate_size = intermediate_size
        self._expert = expert
        self._shared = shared
        self._kept: dict[int, Pair] = {}
        self._kept_shared: Pair | None = None
        self._room = CACHED_BYTES

    def expert(self, expert: int) -> Pair:
        """w13 and w2 of one routed expert."""
        if expert in self._kept:
            return self._kept[expert]
        pair = self._expert(expert)
        size = sum(matrix.nbytes for matrix in pair)
        if size <= self._room:
            self._room -= size
            self._kept[expert] = pair
        return pair

    def shared(self) -> Pair | None:
        """w13 and w2 of the shared expert, or None."""
        if self._kept_shared is None:
            self._kept_shared = self._shared()
        return self._kept_shared


def ideal_weights(source: WeightSource, intermediate_size: int) -> StreamedWeights:
    """As drawn or as the checkpoint says, before any rounding of the recipe."""
    parts = source.common()
    return StreamedWeights(
        parts.gate_weight,
        parts.correction_bias,
        parts.tid2eid,
        intermediate_size,
        source.ideal_expert,
        source.ideal_shared,
    )


class GoldenPreparation:
    """The golden's own load-time preparation of checkpoint weights.

    Args:
        source: gives the checkpoint.
        recipe: the layer's recipe.
        scale_format: what the platform's GEMM reads.
    """

    def __init__(
        self, source: WeightSource, recipe: QuantRecipe, scale_format: ScaleFormat
    ) -> None:
        self._source = source
        self._requantizes = recipe is not QuantRecipe.BF16 and scale_format is ScaleFormat.UE8M0
        self.parts = source.common()

    def expert(self, expert: int) -> Pair:
        """w13 and w2 of one routed expert, float64, as the GEMMs should read them."""
        return self._dequantized(self._source.experts([expert]))

    def shared(self) -> Pair | None:
        """w13 and w2 of the shared expert, or None."""
        return self._dequantized(self.parts.shared) if self.parts.shared else None

    def weights(self, intermediate_size: int) -> StreamedWeights:
        """All of it as the golden forward takes it."""
        return StreamedWeights(
            self.parts.gate_weight,
            self.parts.correction_bias,
            self.parts.tid2eid,
            intermediate_size,
            self.expert,
            self.shared,
        )

    def _dequantized(self, weights: ExpertWeights) -> Pair:
        return self._matrix(weights.w13), self._matrix(weights.w2)

    def _matrix(self, matrix: ExpertMatrix) -> Tensor:
        if matrix.scale is None:
            return matrix.values[0].to(torch.float64)
        codes = codes_f64(matrix.values[0])
        scale = matrix.scale[0].to(torch.float64)
        if self._requantizes:
            return requantize_weight(codes, scale).dequantized
        return codes * spread_blocks(scale, codes.shape)

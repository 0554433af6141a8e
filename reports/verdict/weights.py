"""Weights in float64 for the golden: as drawn, or as the GEMMs of the recipe read them."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import shared_recipe
from moe.weights import ExpertWeights, WeightSource
from reports.verdict.golden_matrix import PaddedSizes, prepared_matrix, stored_matrix
from reports.verdict.layer import JudgedLayer
from reports.verdict.narrow import narrowest

CACHED_BYTES = 1 << 30
"""A layer's experts are kept in float64 up to here; those of a larger one are decoded each time."""

Pair = tuple[Tensor, Tensor]


class StreamedWeights:
    """See ``moe.golden.GoldenWeights``: hands experts out one at a time, keeps them if all fit.

    The shared expert is always kept: in fewer bytes, where those that are routed do not fit.

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

    def expert(self, expert: int) -> Pair:
        """w13 and w2 of one routed expert."""
        if expert in self._kept:
            return self._kept[expert]
        pair = self._expert(expert)
        if self._has_room(pair):
            self._kept[expert] = pair
        return pair

    def _has_room(self, pair: Pair) -> bool:
        """For as many experts as there are."""
        return len(self.gate_weight) * sum(matrix.nbytes for matrix in pair) <= CACHED_BYTES

    def shared(self) -> Pair | None:
        """w13 and w2 of the shared expert, or None."""
        if self._kept_shared is None:
            pair = self._shared()
            if pair is None or self._has_room(pair):
                self._kept_shared = pair
                return pair
            self._kept_shared = narrowest(pair[0]), narrowest(pair[1])
        w13, w2 = self._kept_shared
        return w13.to(torch.float64), w2.to(torch.float64)


def expert_sizes(layer: JudgedLayer) -> PaddedSizes:
    """Of the routed experts."""
    return PaddedSizes(
        hidden_size=layer.expert_hidden_size, intermediate_size=layer.intermediate_size
    )


def ideal_weights(source: WeightSource, sizes: PaddedSizes) -> StreamedWeights:
    """As drawn or as the checkpoint says, before any rounding of the recipe."""
    parts = source.common()

    def expert(expert: int) -> Pair:
        return sizes.ideal(*source.ideal_expert(expert))

    return StreamedWeights(
        parts.gate_weight,
        parts.correction_bias,
        parts.tid2eid,
        sizes.intermediate_size,
        expert,
        source.ideal_shared,
    )


class GoldenPreparation:
    """The golden's own load-time preparation of checkpoint weights.

    Args:
        source: gives the checkpoint.
        recipe: the layer's recipe.
        scale_format: what the platform's GEMM reads.
        sizes: of the routed experts.
    """

    def __init__(
        self,
        source: WeightSource,
        recipe: QuantRecipe,
        scale_format: ScaleFormat,
        sizes: PaddedSizes,
    ) -> None:
        self._source = source
        self._sizes = sizes
        self._recipe = recipe
        self._scale_format = scale_format
        self.parts = source.common()

    def expert(self, expert: int) -> Pair:
        """w13 and w2 of one routed expert, float64, as the GEMMs should read them."""
        return self._prepared(self.stored(expert), self._recipe)

    def shared(self) -> Pair | None:
        """w13 and w2 of the shared expert, or None."""
        if self.parts.shared is None:
            return None
        return self._prepared(self.parts.shared, shared_recipe(self._recipe))

    def has_scales(self, *, shared: bool) -> bool:
        """Whether the routed experts, or the shared one, come with scales."""
        stored = self.parts.shared if shared else self._source.experts([0])
        return stored is not None and stored.w13.scale is not None

    def stored_expert(self, expert: int) -> Pair:
        """w13 and w2 of one routed expert, float64, as the checkpoint has them."""
        stored = self.stored(expert)
        return stored_matrix(stored.w13), stored_matrix(stored.w2)

    def stored_shared(self) -> Pair | None:
        """The same of the shared expert, or None."""
        stored = self.parts.shared
        return None if stored is None else (stored_matrix(stored.w13), stored_matrix(stored.w2))

    def stored(self, expert: int) -> ExpertWeights:
        """The checkpoint's tensors of one routed expert, among the zeros that kernels want."""
        return self._sizes.checkpoint(self._source.experts([expert]))

    def weights(self) -> StreamedWeights:
        """All of it as the golden forward takes it."""
        return StreamedWeights(
            self.parts.gate_weight,
            self.parts.correction_bias,
            self.parts.tid2eid,
            self._sizes.intermediate_size,
            self.expert,
            self.shared,
        )

    def _prepared(self, weights: ExpertWeights, recipe: QuantRecipe) -> Pair:
        w13, w2 = (
            prepared_matrix(matrix, recipe, self._scale_format)
            for matrix in (weights.w13, weights.w2)
        )
        return w13, w2

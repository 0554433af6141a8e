"""The operations between a rank's GEMMs as one value, so that others can compute them.

What is here is torch's; ``moe.triton_kernels`` has the same operations in the same call shapes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from moe.fold import fold_topk_weights
from moe.formats import GatedActivation, ScaleFormat
from moe.indices import scatter_index
from moe.quant.fp8 import ACTIVATION_AMAX_FLOOR, GROUP_SIZE, QuantizedRows, quantize_groups
from moe.rows import spread_rows, spread_scales, take_rows
from moe.slabs import spread_slab_scales, spread_slabs
from moe.stages import ActivationOutput


class QuantizeGroups(Protocol):
    """See ``moe.quant.fp8.quantize_groups``."""

    def __call__(
        self,
        rows: Tensor,
        scale_format: ScaleFormat,
        *,
        group_size: int = GROUP_SIZE,
        amax_floor: float = ACTIVATION_AMAX_FLOOR,
    ) -> QuantizedRows:
        """Codes and scales of [R, C] rows."""
        ...


class ScatterRows(Protocol):
    """See ``scatter_rows``."""

    def __call__(
        self,
        rows: Tensor,
        source: Tensor,
        places: Tensor,
        num_rows: int,
        /,
        *,
        zeroes_padding: bool = False,
    ) -> Tensor:
        """[num_rows, C]."""
        ...


class FoldTopkWeights(Protocol):
    """See ``moe.fold.fold_topk_weights``."""

    def __call__(
        self,
        rows: Tensor,
        output_index: Tensor,
        topk_weights: Tensor,
        is_route: Tensor,
        factor: float = 1.0,
    ) -> Tensor:
        """[R, H] bf16."""
        ...


class FusedActivation(Protocol):
    """A gated activation with the quantiser behind it, of rows in their places.

    Rows that hold no route are poison in what it returns.
    """

    def segments(self, gate_up: Tensor, live_rows: Tensor) -> ActivationOutput:
        """Of [M, 2I] bf16 the rows [N] int64 that hold a route."""
        ...

    def slabs(self, gate_up: Tensor, masked_m: Tensor) -> ActivationOutput:
        """Of [L, S, 2I] bf16 the first [L] int32 rows of each slab."""
        ...

    def dense(self, gate_up: Tensor) -> ActivationOutput:
        """Of all rows [M, 2I] bf16."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKernels:
    """Who quantises, moves, activates and adds rows.

    name                 as in the result's ``backends``
    quantize_groups      rows to e4m3 codes and scales
    scatter_index        rows of routes, the index half of ep_scatter and of the masked preprocess
    scatter_rows         the copying half, to segments
    scatter_scales       the same for their scales
    scatter_slabs        the copying half, to slabs
    scatter_slab_scales  the same for their scales
    fold_topk_weights    ep_gather and post_reorder
    weigh_rows           rows of slabs back in their places, weighed
    fused_activation     (rule, scale format, group size) -> activation and quantiser in one; None:
                         the runner takes one step after the other
    """

    name: str
    quantize_groups: QuantizeGroups
    scatter_index: Callable[[Tensor, Tensor, int], Tensor]
    scatter_rows: ScatterRows
    scatter_scales: ScatterRows
    scatter_slabs: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
    scatter_slab_scales: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
    fold_topk_weights: FoldTopkWeights
    weigh_rows: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    fused_activation: Callable[[GatedActivation, ScaleFormat, int], FusedActivation] | None


def scatter_rows(
    rows: Tensor, source: Tensor, places: Tensor, num_rows: int, *, zeroes_padding: bool = False
) -> Tensor:
    """[num_rows, C] with ``rows[source[i]]`` at ``places[i]``; elsewhere as ``spread_rows``."""
    return spread_rows(take_rows(rows, source), places, num_rows, zeroes_padding=zeroes_padding)


def scatter_scales(
    scale: Tensor, source: Tensor, places: Tensor, num_rows: int, *, zeroes_padding: bool = False
) -> Tensor:
    """As ``scatter_rows`` for scales in either format; elsewhere as ``spread_scales``."""
    return spread_scales(take_rows(scale, source), places, num_rows, zeroes_padding=zeroes_padding)


def scatter_slabs(
    rows: Tensor, source: Tensor, places: Tensor, num_slabs: int, height: int
) -> Tensor:
    """[L, S, C] with ``rows[source[i]]`` at ``places[i]``, counted over all slabs; else poison."""
    return spread_slabs(take_rows(rows, source), places, num_slabs, height)


def scatter_slab_scales(
    scale: Tensor, source: Tensor, places: Tensor, num_slabs: int, height: int
) -> Tensor:
    """As ``scatter_slabs`` for scales in either format; laid out as ``spread_slab_scales``."""
    return spread_slab_scales(take_rows(scale, source), places, num_slabs, height)


def weigh_rows(rows: Tensor, source: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """``rows[source[i]] * weights[places[i]]`` at ``places[i]``: fp32, one rounding to bf16.

    Args:
        rows: [N, H] bf16.
        source: [V] int64.
        places: [V] int64.
        weights: [C] fp32.

    Returns:
        [C, H] bf16, poison elsewhere.
    """
    taken = take_rows(rows, source).to(torch.float32)
    weighted = taken.mul_(weights[places, None]).to(torch.bfloat16)
    return spread_rows(weighted, places, weights.shape[0])


TORCH_KERNELS: Final = RowKernels(
    name="torch",
    quantize_groups=quantize_groups,
    scatter_index=scatter_index,
    scatter_rows=scatter_rows,
    scatter_scales=scatter_scales,
    scatter_slabs=scatter_slabs,
    scatter_slab_scales=scatter_slab_scales,
    fold_topk_weights=fold_topk_weights,
    weigh_rows=weigh_rows,
    fused_activation=None,
)

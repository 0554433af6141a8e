"""One slab of rows an expert: rows spread over slabs between poison.

A place counts the rows of all slabs: ``slab * height + row``.
"""

import torch
from torch import Tensor

from moe.poison import poison
from moe.rows import spread_rows


def spread_slabs(rows: Tensor, places: Tensor, num_slabs: int, height: int) -> Tensor:
    """[num_slabs, height, C] with row-major ``rows`` [N, C] at ``places`` [N], poison elsewhere."""
    return spread_rows(rows, places, num_slabs * height).view(num_slabs, height, rows.shape[1])


def spread_slab_scales(scale: Tensor, places: Tensor, num_slabs: int, height: int) -> Tensor:
    """As ``spread_slabs``; packed words lie with the rows of a slab along the fastest axis.

    Args:
        scale: [N, G] fp32, or [N, W] int32 packed UE8M0 in any layout.
        places: [N] integer.
        num_slabs: L.
        height: S, a multiple of 4 where scales are packed.

    Returns:
        [L, S, G] row-major, or [L, S, W] with strides (W * S, 1, S).
    """
    if scale.dtype != torch.int32:
        return spread_slabs(scale, places, num_slabs, height)
    words = poison(scale.new_empty((num_slabs, scale.shape[1], height))).transpose(1, 2)
    words[places // height, places % height] = scale
    return words

"""The operations of ``moe.row_kernels`` as Triton kernels, for a GPU or Triton's interpreter.

Triton reads TRITON_INTERPRET once, as this package is imported.
"""

from typing import Final

from moe.formats import GatedActivation, ScaleFormat
from moe.row_kernels import RowKernels
from moe.triton_kernels.gather import fold_topk_weights, weigh_rows
from moe.triton_kernels.group_quant import quantize_groups
from moe.triton_kernels.scatter import (
    scatter_index,
    scatter_rows,
    scatter_scales,
    scatter_slab_scales,
    scatter_slabs,
)
from moe.triton_kernels.silu_and_mul import SiluAndMul

__all__ = ["TRITON_KERNELS", "SiluAndMul"]


def _silu_and_mul(rule: GatedActivation, scale_format: ScaleFormat, group_size: int) -> SiluAndMul:
    return SiluAndMul(rule=rule, scale_format=scale_format, group_size=group_size)


TRITON_KERNELS: Final = RowKernels(
    name="triton",
    quantize_groups=quantize_groups,
    scatter_index=scatter_index,
    scatter_rows=scatter_rows,
    scatter_scales=scatter_scales,
    scatter_slabs=scatter_slabs,
    scatter_slab_scales=scatter_slab_scales,
    fold_topk_weights=fold_topk_weights,
    weigh_rows=weigh_rows,
    fused_activation=_silu_and_mul,
)

"""What a conversion is told besides the rows: the facts of the layer on this rank."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moe.formats import GemmLayout
from moe.quant.fp8 import QuantizedRows
from moe.row_kernels import TORCH_KERNELS, RowKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class PermuteContext:
    """Facts of the layer; each format uses those that its dispatch has left open.

    num_local_experts      L, expert slots of this rank
    num_experts            expert slots of all ranks; sizes a tuning hint and nothing else
    layout                 of the grouped rows
    row_alignment          rows; a segment's length in the contiguous layout is a multiple of it
    routed_scaling_factor  for the formats that fold it into the weighted sum
    quantize               bf16 rows -> codes and scales, where dispatch moves bf16; None keeps bf16
    requantize             (codes, scales) -> both again, where the wire has other scales than the
                           GEMMs read; None: they are the same
    expert_start           first physical slot of this rank, for formats whose ids stay global
    slot_order_seed        order of an expert's routes: unspecified upstream, so drawn
    caps_slabs             slabs as high as the fullest expert needs
    zeroes_padding         padding of scattered rows is zero, as in deterministic inference
    wide_segments          SM120's own contiguous path: room for one more block an expert than the
                           routes fill, and the factor multiplies the sum once it is stored
    kernels                who moves and adds the rows
    """

    num_local_experts: int
    num_experts: int
    layout: GemmLayout
    row_alignment: int
    routed_scaling_factor: float
    quantize: Callable[[Tensor], QuantizedRows] | None
    requantize: Callable[[Tensor, Tensor], QuantizedRows] | None = None
    expert_start: int = 0
    slot_order_seed: int = 0
    caps_slabs: bool = False
    zeroes_padding: bool = False
    wide_segments: bool = False
    kernels: RowKernels = TORCH_KERNELS

"""How kernels are started: grids, and what keeps a product and a sum from being fused."""

from typing import Any, Final

import torch
from torch import Tensor

ROUNDS_EVERY_STEP: Final[dict[str, Any]] = {"enable_fp_fusion": False}
"""Launch option: ``a * b + c`` rounds twice, as torch does, on every device."""

CARRIER: Final = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
}
"""dtype -> the integer that carries its bits into a kernel; others go as they are."""


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory in the dtype that a kernel reads."""
    return tensor.view(CARRIER.get(tensor.dtype, tensor.dtype))


def next_power_of_2(number: int) -> int:
    """The least power of two that is not under ``number``, which is 1 or more."""
    return 1 << (number - 1).bit_length()

"""Power-of-two scales: an unsigned exponent byte ``e`` stands for ``2 ** (e - 127)``."""

import torch
from torch import Tensor

from moe.indices import align, ceil_div

BYTES_PER_WORD = 4
TMA_ALIGNED_WORDS = 4


def exponent_rounded_up(scale: Tensor) -> Tensor:
    """Smallest power of two that is not under ``scale``, as an exponent byte.

    Args:
        scale: fp32, not negative.

    Returns:
        uint8, same shape; exact powers of two keep their exponent, infinity and NaN become 255.
        Zero becomes 0, which stands for 2 ** -127, and so does no subnormal: those become 1.
    """
    bits = scale.view(torch.int32)
    return (((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0)).clamp_(max=255).to(torch.uint8)


def scale_from_exponent(exponent: Tensor) -> Tensor:
    """uint8 exponents as fp32 powers of two; 0 is the subnormal 2 ** -127, 255 is NaN.

    Source: OCP Microscaling Formats (MX) Specification 1.0, scale format E8M0.
    """
    return _look_up(_SCALE, exponent)


def reciprocal_from_exponent(exponent: Tensor) -> Tensor:
    """fp32 ``2 ** (127 - e)``; subnormal for the exponent bytes 254 and 255."""
    return _look_up(_RECIPROCAL, exponent)


_BYTES = torch.arange(256, dtype=torch.float64)
_SCALE = torch.exp2(_BYTES - 127).masked_fill(_BYTES == 255, torch.nan).to(torch.float32)
_RECIPROCAL = torch.exp2(127 - _BYTES).to(torch.float32)


def _look_up(table: Tensor, exponent: Tensor) -> Tensor:
    """One table look-up: six times cheaper on a CPU than building the bits."""
    index = exponent.to(torch.int32).flatten()
    return table.to(exponent.device).index_select(0, index).view(exponent.shape)


def mn_major(words: Tensor) -> Tensor:
    """The same values with rows along the fastest axis, each column 16-byte aligned.

    Args:
        words: [..., MN, W] of a 4-byte dtype.

    Returns:
        [..., MN, W], strides (..., 1, MN rounded up to 4); the tail of a column is zero.
    """
    *batch, rows, width = words.shape
    storage = words.new_zeros((*batch, width, align(rows, TMA_ALIGNED_WORDS)))
    view = storage.transpose(-1, -2)[..., :rows, :]
    view.copy_(words)
    return view


def tma_aligned(scale: Tensor) -> Tensor:
    """Scales as GEMMs read them, ``mn_major``; themselves where they lie so already.

    Source: SGLang 0.5.21, fp8_kernel.py::tma_align_input_scale.
    """
    rows = scale.shape[-2]
    return scale if scale.stride()[-2:] == (1, align(rows, TMA_ALIGNED_WORDS)) else mn_major(scale)


def row_major(words: Tensor) -> Tensor:
    """The same values with columns along the fastest axis.

    ``contiguous()`` is not enough: it keeps the odd stride of a single MN-major column.
    """
    return words.clone(memory_format=torch.contiguous_format)


def pack_ue8m0(exponents: Tensor) -> Tensor:
    """Four exponent bytes to an int32 word, lowest byte first, MN-major.

    Args:
        exponents: [..., MN, G] uint8.

    Returns:
        [..., MN, ceil(G / 4)] int32, strides (..., 1, MN rounded up to 4); bytes past G are zero.

    Source: DeepGEMM, get_mn_major_tma_aligned_packed_ue8m0_tensor.
    """
    *batch, rows, groups = exponents.shape
    width = ceil_div(groups, BYTES_PER_WORD)
    padded = exponents.new_zeros((*batch, rows, width * BYTES_PER_WORD))
    padded[..., :groups] = exponents
    return mn_major(padded.view(torch.int32))


def unpack_ue8m0(packed: Tensor, groups: int) -> Tensor:
    """Exponent bytes of ``pack_ue8m0``.

    Args:
        packed: [..., MN, W] int32 in any layout.
        groups: G, the bytes of a row that mean something.

    Returns:
        [..., MN, G] uint8
    """
    return row_major(packed).view(torch.uint8)[..., :groups]

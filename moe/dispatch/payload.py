"""Several tensors with one row each as one row of bytes: a message carries all a token needs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.quant.ue8m0 import row_major


def pack_columns(columns: Sequence[Tensor]) -> Tensor:
    """Lay the rows of several tensors side by side.

    Args:
        columns: tensors [N, C_i] of any dtype and any layout.

    Returns:
        [N, sum of row bytes] uint8
    """
    packed = [column if column.stride(-1) == 1 else row_major(column) for column in columns]
    return torch.cat([column.view(torch.uint8) for column in packed], dim=-1)


def unpack_columns(payload: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of ``pack_columns`` again.

    Args:
        payload: [N, bytes] uint8
        like: tensors [*, C_i] that give each column's width and dtype.

    Returns:
        tensors [N, C_i], row-major
    """
    widths = [column.shape[1] * column.element_size() for column in like]
    parts = torch.split(payload, widths, dim=-1)
    return [row_major(part).view(column.dtype) for part, column in zip(parts, like, strict=True)]

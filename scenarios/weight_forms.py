"""From bf16 matrices to the form in which a checkpoint holds them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.quant.fp8 import E4M3_MAX, WEIGHT_AMAX_FLOOR, quantize_blocks, round_to_e4m3
from moe.quant.mxfp import MX_GROUP_SIZE, quantize_mxfp4, quantize_mxfp8
from moe.quant.ue8m0 import exponent_rounded_up, scale_from_exponent
from moe.recipes import WeightFormat
from moe.weights import ExpertMatrix


def checkpoint_form(
    matrix: Tensor, form: WeightFormat, *, parts: int = 1, power_of_two_scales: bool = False
) -> ExpertMatrix:
    """What a checkpoint made from these values would hold.

    Args:
        matrix: [L, N, K] bf16.
        form: which checkpoint.
        parts: equal parts of the rows that are matrices of their own, 2 for gate and up; counts
            where a matrix has one scale.
        power_of_two_scales: scales of a whole matrix are rounded up to a power of two.

    Raises:
        ValueError: K does not split into the form's groups.
    """
    if form is WeightFormat.FP8_PER_TENSOR:
        return _per_tensor(matrix, parts, power_of_two_scales)
    return _FORMS[form](matrix)


def _as_drawn(matrix: Tensor) -> ExpertMatrix:
    return ExpertMatrix(values=matrix, scale=None)


def _blocks(matrix: Tensor) -> ExpertMatrix:
    blocks = quantize_blocks(matrix, ScaleFormat.FP32)
    return ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)


def _per_tensor(matrix: Tensor, parts: int, power_of_two_scales: bool) -> ExpertMatrix:
    """Scale ``amax / 448`` of each part, with the floor that blocks have too."""
    num_experts, n, k = matrix.shape
    rows = matrix.to(torch.float32).view(num_experts, parts, n // parts, k)
    amax = rows.abs().amax((-2, -1)).clamp_min(WEIGHT_AMAX_FLOOR)
    scale = amax / amax.new_tensor(E4M3_MAX)  # a GPU multiplies by the reciprocal of a number
    if power_of_two_scales:
        scale = scale_from_exponent(exponent_rounded_up(scale))
    codes = round_to_e4m3(rows * (1 / scale)[..., None, None])
    return ExpertMatrix(values=codes.view(matrix.shape), scale=scale)


def _mxfp8(matrix: Tensor) -> ExpertMatrix:
    values, scale = quantize_mxfp8(matrix)
    return ExpertMatrix(values=values, scale=scale, group_size=MX_GROUP_SIZE)


def _mxfp4(matrix: Tensor) -> ExpertMatrix:
    values, scale = quantize_mxfp4(matrix)
    return ExpertMatrix(values=values, scale=scale, group_size=MX_GROUP_SIZE)


_FORMS: Final[Mapping[WeightFormat, Callable[[Tensor], ExpertMatrix]]] = MappingProxyType(
    {
        WeightFormat.BF16: _as_drawn,
        WeightFormat.FP8_BLOCK128: _blocks,
        WeightFormat.MXFP8: _mxfp8,
        WeightFormat.MXFP4: _mxfp4,
    }
)

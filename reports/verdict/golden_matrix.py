"""One weight matrix in float64: as a checkpoint stores it, and as the golden prepares it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import (
    decode_mxfp4,
    decode_mxfp8,
    fp4_as_fp8,
    merge_per_tensor,
    quantize_mxfp8_weight,
    requantize_weight,
)
from moe.weights import ExpertMatrix, ExpertWeights
from reports.verdict.decode import BLOCK, codes_f64, spread_blocks

BYTES_AT_ONCE = 1 << 24
"""Of a float64 matrix whose rows are prepared together: runs of whole blocks of rows."""


def stored_matrix(matrix: ExpertMatrix) -> Tensor:
    """[N, K] float64 that the first expert's stored values stand for; see ``ExpertMatrix``."""
    values = matrix.values[0]
    if matrix.scale is None:
        return values.to(torch.float64)
    scale = matrix.scale[0]
    if scale.dtype == torch.uint8:
        is_fp4 = values.dtype == torch.uint8
        return (
            decode_mxfp4(values, scale) if is_fp4 else decode_mxfp8(values.view(torch.uint8), scale)
        )
    if scale.dim() == 2:
        return _in_blocks(values, scale, _dequantized)
    codes = codes_f64(values)
    return codes * _by_part(scale, len(codes))


def _in_blocks(
    values: Tensor, scale: Tensor, prepared: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """[N, K] float64 made of e4m3 codes [N, K] and a scale a block, some blocks of rows at a time.

    Args:
        values: [N, K] codes.
        scale: [ceil(N/128), ceil(K/128)].
        prepared: makes [R, K] float64 of float64 codes [R, K] and scales.
    """
    num_rows, width = values.shape
    at_once = max(BYTES_AT_ONCE // (8 * width * BLOCK), 1)
    whole = torch.empty(num_rows, width, dtype=torch.float64, device=values.device)
    for first in range(0, len(scale), at_once):
        rows = slice(first * BLOCK, (first + at_once) * BLOCK)
        of_rows = scale[first : first + at_once].to(torch.float64)
        whole[rows] = prepared(codes_f64(values[rows]), of_rows)
    return whole


def _dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    return codes * spread_blocks(scale, codes.shape)


def _requantized(codes: Tensor, scale: Tensor) -> Tensor:
    return requantize_weight(codes, scale).dequantized


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSizes:
    """Sizes of routed experts with the zeros that their kernels want, written down once more.

    hidden_size        columns of w13, rows of w2
    intermediate_size  rows of gate and of up, columns of w2
    """

    hidden_size: int
    intermediate_size: int

    def checkpoint(self, weights: ExpertWeights) -> ExpertWeights:
        """Checkpoint tensors of some experts among zeros: codes and scale bytes."""
        return ExpertWeights(
            w13=_among_zeros(weights.w13, 2, self.intermediate_size, self.hidden_size),
            w2=_among_zeros(weights.w2, 1, self.hidden_size, self.intermediate_size),
        )

    def ideal(self, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        """Unrounded [2I, H] and [H, I] among zeros."""
        return (
            _cells_among_zeros(w13[None], 2, self.intermediate_size, self.hidden_size)[0],
            _cells_among_zeros(w2[None], 1, self.hidden_size, self.intermediate_size)[0],
        )


def _among_zeros(matrix: ExpertMatrix, parts: int, rows: int, columns: int) -> ExpertMatrix:
    """Only forms with a scale for each row and group are ever padded."""
    if (matrix.values.shape[1], matrix.in_features) == (parts * rows, columns):
        return matrix

    def among_zeros(cells: Tensor) -> Tensor:
        wide = columns * cells.shape[-1] // matrix.in_features
        return _cells_among_zeros(cells, parts, rows, wide)

    scale = None if matrix.scale is None else among_zeros(matrix.scale)
    return replace(matrix, values=among_zeros(matrix.values), scale=scale)


def _cells_among_zeros(cells: Tensor, parts: int, rows: int, columns: int) -> Tensor:
    """[L, parts * rows, columns]: each of ``parts`` equal runs of rows in its corner of zeros."""
    num_experts, num_rows, num_columns = cells.shape
    padded = cells.new_zeros(num_experts, parts * rows, columns)
    length = num_rows // parts
    for part in range(parts):
        corner = padded[:, part * rows : part * rows + length, :num_columns]
        corner.copy_(cells[:, part * length : (part + 1) * length])
    return padded


def prepared_matrix(matrix: ExpertMatrix, recipe: QuantRecipe, scale_format: ScaleFormat) -> Tensor:
    """[N, K] float64 that a GEMM should multiply the first expert with.

    Args:
        matrix: in the recipe's checkpoint form.
        recipe: of this matrix.
        scale_format: what the platform's GEMM reads.

    Source: SGLang 0.5.21, quantization/fp8.py, the load-time paths.
    """
    return _PREPARED[recipe](matrix, scale_format)


def _blocks(matrix: ExpertMatrix, scale_format: ScaleFormat) -> Tensor:
    if scale_format is not ScaleFormat.UE8M0:
        return stored_matrix(matrix)
    assert matrix.scale is not None
    return _in_blocks(matrix.values[0], matrix.scale[0], _requantized)


def _per_tensor(matrix: ExpertMatrix, scale_format: ScaleFormat) -> Tensor:
    assert matrix.scale is not None
    codes, scale = codes_f64(matrix.values[0]), matrix.scale[0].to(torch.float64)
    return merge_per_tensor(codes, scale)


def _mxfp8(matrix: ExpertMatrix, scale_format: ScaleFormat) -> Tensor:
    if matrix.scale is None:
        return quantize_mxfp8_weight(matrix.values[0].to(torch.float64)).dequantized
    return stored_matrix(matrix)


def _fp4_as_fp8(matrix: ExpertMatrix, scale_format: ScaleFormat) -> Tensor:
    assert matrix.scale is not None
    blocks = fp4_as_fp8(matrix.values[0], matrix.scale[0])
    if scale_format is not ScaleFormat.UE8M0:
        return blocks.dequantized
    return requantize_weight(blocks.codes, blocks.scale).dequantized


_PREPARED: Final[Mapping[QuantRecipe, Callable[[ExpertMatrix, ScaleFormat], Tensor]]] = (
    MappingProxyType(
        {
            QuantRecipe.BF16: lambda matrix, _: stored_matrix(matrix),
            QuantRecipe.FP8_BLOCK128: _blocks,
            QuantRecipe.FP8_PER_TENSOR: _per_tensor,
            QuantRecipe.MXFP8: _mxfp8,
            QuantRecipe.MXFP4_W4A8: lambda matrix, _: stored_matrix(matrix),
            QuantRecipe.MXFP4_AS_FP8: _fp4_as_fp8,
        }
    )
)


def _by_part(scale: Tensor, num_rows: int) -> Tensor:
    """[N, 1] float64 of [P] scales, one for each of P equal parts of the rows."""
    return scale.to(torch.float64).repeat_interleave(num_rows // len(scale))[:, None]

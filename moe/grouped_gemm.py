"""The reference GEMM, grouped and dense, in torch on any device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.arithmetic import ArithmeticModel
from moe.formats import ScaleFormat
from moe.gemm_backend import LoadedMatrix
from moe.gemm_segments import Segment, places_of, segments_of, slab_tiles
from moe.indices import ceil_div
from moe.quant.e2m1 import unpacked_e2m1_to_fp32
from moe.quant.fp8 import GROUP_SIZE, e4m3_to_fp32, times_group_scales
from moe.quant.ue8m0 import BYTES_PER_WORD, row_major
from moe.rows import spread_rows, take_rows
from moe.weights import ExpertMatrix

ROWS_THAT_KEEP_BITS = 64
"""MKL picks other kernels for few rows (fp32: up to 13), which changes bits; whole 64s never do.

cuBLAS picks by the number of rows at any size, so on a GPU each 64 are a product of their own.
"""

COLUMNS_THAT_KEEP_BITS = 256
"""MKL shares longer sums out among threads (seen from 384 columns on), by numbers of rows too."""

CACHED_MATRIX_BYTES = 1 << 28
"""Up to here a matrix is kept as fp32; a larger one is converted expert by expert at each call."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TorchMatrix:
    """fp32 copies of the weights where they fit, else the weights themselves.

    matrix   the prepared weights
    as_fp32  [L, N, K] dequantised (bf16, UE8M0) or bare codes (fp32 scales), or None
    """

    matrix: ExpertMatrix
    as_fp32: Tensor | None

    @property
    def out_features(self) -> int:
        """N."""
        return self.matrix.values.shape[1]

    def expert(self, index: int) -> Tensor:
        """[N, K] fp32 of one expert."""
        if self.as_fp32 is not None:
            return self.as_fp32[index]
        scale = None if self.matrix.scale is None else self.matrix.scale[index]
        return _operand(self.matrix.values[index], scale, self.matrix.group_size)


class TorchGemm:
    """Reference GEMM: fp32 sums on any device, of rows that do not depend on others.

    Power-of-two scales multiply exactly, so rows are dequantised first; with fp32 scales each
    128 columns are summed, multiplied by both scales and added up, as DeepGEMM does on SM90.

    Args:
        device: where it multiplies. cuBLAS takes other kernels for other numbers of columns.
    """

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self._device = device

    def arithmetic(self, scale_format: ScaleFormat) -> ArithmeticModel:
        """fp32 accumulation; scaled block by block where scales have a mantissa."""
        return ArithmeticModel(
            summed_block=COLUMNS_THAT_KEEP_BITS,
            scaled_block=GROUP_SIZE if scale_format is ScaleFormat.FP32 else None,
            columns_stand_alone=self._device == "cpu",
        )

    def load(self, matrix: ExpertMatrix) -> TorchMatrix:
        """Keep fp32 copies of matrices up to ``CACHED_MATRIX_BYTES``."""
        num_experts, out_features = matrix.values.shape[:2]
        fits = num_experts * out_features * matrix.in_features * 4 <= CACHED_MATRIX_BYTES
        return TorchMatrix(
            matrix=matrix,
            as_fp32=_operand(matrix.values, matrix.scale, matrix.group_size) if fits else None,
        )

    def grouped_gemm_nt_contig(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        m_indices: Tensor,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """See ``GemmBackend``."""
        assert isinstance(rhs, TorchMatrix)
        segments = segments_of(lhs, lhs_scale, m_indices, ROWS_THAT_KEEP_BITS)
        return _multiply_segments(lhs, lhs_scale, rhs, segments, lhs_group)

    def grouped_gemm_nt_masked(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        masked_m: Tensor,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """See ``GemmBackend``; a tile is ``ROWS_THAT_KEEP_BITS`` rows."""
        assert isinstance(rhs, TorchMatrix)
        num_slabs, height = lhs.shape[:2]
        scale = None if lhs_scale is None else lhs_scale.flatten(0, 1)
        tiles = slab_tiles(masked_m, height, ROWS_THAT_KEEP_BITS)
        product = _multiply_segments(lhs.flatten(0, 1), scale, rhs, tiles, lhs_group)
        return product.view(num_slabs, height, rhs.out_features)

    def gemm_nt(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """See ``GemmBackend``."""
        assert isinstance(rhs, TorchMatrix)
        sums = lhs.new_empty((lhs.shape[0], rhs.out_features), dtype=torch.float32)
        rows = _rows_for(rhs, lhs, lhs_scale, lhs_group)
        _multiply(rows, lhs_scale, rhs, expert=0, out=sums)
        return sums.to(torch.bfloat16)


def _multiply_segments(
    lhs: Tensor,
    lhs_scale: Tensor | None,
    rhs: TorchMatrix,
    segments: list[Segment],
    lhs_group: int,
) -> Tensor:
    """[M, N] bf16 of [M, K] rows; rows of no segment are poison."""
    computed, filled, source = places_of(segments, lhs.device)
    scale = None if lhs_scale is None else take_rows(lhs_scale, computed)
    rows = _rows_for(rhs, take_rows(lhs, computed), scale, lhs_group)
    sums = rows.new_empty((rows.shape[0], rhs.out_features))
    start = 0
    for segment in segments:
        part = slice(start, start + segment.end - segment.start)
        part_scale = None if scale is None else scale[part]
        _multiply(rows[part], part_scale, rhs, segment.expert, out=sums[part])
        start = part.stop
    stored = sums.to(torch.bfloat16)
    if len(filled) > len(computed):
        stored = take_rows(stored, source)
    return spread_rows(stored, filled, lhs.shape[0])


def _rows_for(rhs: TorchMatrix, lhs: Tensor, scale: Tensor | None, lhs_group: int) -> Tensor:
    """[M, K] fp32 rows as ``rhs`` meets them: exact values, or codes if all scales have mantissas.

    Scales of both operands should have one form. Whoever mixes forms up is told so by what he
    gets, not by a crash here.

    Raises:
        ValueError: only one operand is quantised, or a row has another number of scales than
            groups.
    """
    of_rhs = rhs.matrix.scale
    if (scale is None) != (of_rhs is None):
        raise ValueError("one operand only is quantised")
    _check_groups(lhs, scale, lhs_group)
    if scale is None or of_rhs is None or scale.dtype == of_rhs.dtype:
        return _operand(lhs, scale, lhs_group)
    return times_group_scales(e4m3_to_fp32(lhs), row_major(scale), lhs_group)


def _check_groups(lhs: Tensor, scale: Tensor | None, lhs_group: int) -> None:
    """A scale for each group, or a word for four of them."""
    if scale is None:
        return
    groups = ceil_div(lhs.shape[-1], lhs_group)
    due = ceil_div(groups, BYTES_PER_WORD) if scale.dtype == torch.int32 else groups
    if scale.shape[-1] != due:
        raise ValueError(f"{scale.shape[-1]} scales a row of {groups} groups of {lhs_group}")


def _multiply(
    rows: Tensor, scale: Tensor | None, rhs: TorchMatrix, expert: int, *, out: Tensor
) -> None:
    """Fill ``out`` [M, N] fp32 from ``_rows_for``; fp32 scales are left to be applied here."""
    of_rhs = rhs.matrix.scale
    if scale is None or of_rhs is None or of_rhs.dtype == torch.int32:
        _fill_product(out, rows, rhs.expert(expert))
        return
    if scale.dtype == torch.int32:  # applied already
        scale = rows.new_ones(len(rows), of_rhs.shape[-1])
    _fill_scaled_product(out, rows, scale, rhs.expert(expert), of_rhs[expert])


def matmul_nt(lhs: Tensor, rhs: Tensor) -> Tensor:
    """[M, K] x [N, K] -> [M, N] in fp32; no row's bits depend on M or on the number of threads."""
    out = lhs.new_empty((lhs.shape[0], rhs.shape[0]))
    _fill_product(out, lhs, rhs)
    return out


def _fill_product(out: Tensor, lhs: Tensor, rhs: Tensor) -> None:
    """See ``matmul_nt``; whole 64s of rows are multiplied in place, on a GPU one by one."""
    m, k = lhs.shape
    missing = -m % ROWS_THAT_KEEP_BITS
    if missing:
        padded = lhs.new_empty((m + missing, rhs.shape[0]))
        _fill_product(padded, torch.nn.functional.pad(lhs, (0, 0, 0, missing)), rhs)
        out.copy_(padded[:m])
        return
    if lhs.is_cuda and m > ROWS_THAT_KEEP_BITS:
        tiles = (torch.split(rows, ROWS_THAT_KEEP_BITS) for rows in (lhs, out))
        for rows, sums in zip(*tiles, strict=True):
            _fill_product(sums, rows, rhs)
        return
    transposed = rhs.t()
    torch.mm(lhs[:, :COLUMNS_THAT_KEEP_BITS], transposed[:COLUMNS_THAT_KEEP_BITS], out=out)
    for start in range(COLUMNS_THAT_KEEP_BITS, k, COLUMNS_THAT_KEEP_BITS):
        columns = slice(start, start + COLUMNS_THAT_KEEP_BITS)
        out += lhs[:, columns] @ transposed[columns]  # never addmm: it may sum in one long chain


def _operand(values: Tensor, scale: Tensor | None, group_size: int) -> Tensor:
    """[..., K] fp32: exact values, or bare codes where the scale has a mantissa."""
    if scale is None:
        return values.to(torch.float32)
    is_fp4 = values.dtype == torch.uint8
    codes = unpacked_e2m1_to_fp32(values) if is_fp4 else e4m3_to_fp32(values)
    return times_group_scales(codes, scale, group_size) if scale.dtype == torch.int32 else codes


def _fill_scaled_product(
    out: Tensor, lhs: Tensor, lhs_scale: Tensor, rhs: Tensor, rhs_scale: Tensor
) -> None:
    """Sum 128 columns at a time, each partial sum times ``fl(lhs scale * rhs scale)``."""
    n, k = rhs.shape
    scale_by_row = rhs_scale.repeat_interleave(GROUP_SIZE, dim=0)[:n]
    out.zero_()
    for block in range(lhs_scale.shape[1]):
        columns = slice(block * GROUP_SIZE, min((block + 1) * GROUP_SIZE, k))
        partial = matmul_nt(lhs[:, columns], rhs[:, columns])
        out += partial.mul_(lhs_scale[:, block, None] * scale_by_row[:, block])

"""What a backend of grouped and dense GEMMs promises: ``out = lhs @ rhs.T``, bare ``m, n, k``."""

from typing import Protocol

from torch import Tensor

from moe.arithmetic import ArithmeticModel
from moe.formats import ScaleFormat
from moe.quant.fp8 import GROUP_SIZE
from moe.weights import ExpertMatrix


class LoadedMatrix(Protocol):
    """An ``ExpertMatrix`` as a backend keeps it."""

    @property
    def out_features(self) -> int:
        """N, the columns a GEMM with it produces."""
        ...


class GemmBackend(Protocol):
    """Who multiplies; results are bf16 with an fp32 accumulator."""

    @property
    def name(self) -> str:
        """As in the result's ``backends``."""
        ...

    def arithmetic(self, scale_format: ScaleFormat) -> ArithmeticModel:
        """What this backend declares about its sums."""
        ...

    def load(self, matrix: ExpertMatrix) -> LoadedMatrix:
        """Take over prepared weights, once."""
        ...

    def grouped_gemm_nt_contig(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        m_indices: Tensor,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """Multiply every segment with its expert.

        Args:
            lhs: [M, K] bf16, or e4m3 with ``lhs_scale`` [M, G] fp32 or [M, ceil(G/4)] int32.
            lhs_scale: see ``lhs``.
            rhs: [L, N, K]
            m_indices: [M] int32, local expert of each row; rows of -1 stay unwritten (poison).
            lhs_group: columns that a scale of ``lhs`` covers; DeepGEMM's recipe_a is (1, this).

        Returns:
            [M, N] bf16
        """
        ...

    def grouped_gemm_nt_masked(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        masked_m: Tensor,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """Multiply every slab with its expert.

        Args:
            lhs: [L, S, K] bf16, or e4m3 with ``lhs_scale`` [L, S, G] fp32 or
                [L, S, ceil(G/4)] int32.
            lhs_scale: see ``lhs``.
            rhs: [L, N, K]
            masked_m: [L] int32, real rows of each slab; those behind its last tile stay unwritten.
            lhs_group: columns that a scale of ``lhs`` covers.

        Returns:
            [L, S, N] bf16
        """
        ...

    def gemm_nt(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """The dense form: all rows with expert 0 of ``rhs``; returns [M, N] bf16."""
        ...

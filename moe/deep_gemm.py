"""DeepGEMM behind ``GemmBackend``: the only file that knows the library's names, which move."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from moe.arithmetic import DEEP_GEMM_SM90, TENSOR_CORES, ArithmeticModel
from moe.formats import ScaleFormat
from moe.gemm_backend import LoadedMatrix
from moe.poison import poison
from moe.quant.fp8 import GROUP_SIZE
from moe.quant.ue8m0 import tma_aligned
from moe.weights import ExpertMatrix

_NAMES: Final = {
    "fp8 contig": ("m_grouped_fp8_gemm_nt_contiguous",),
    "fp8 masked": ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked"),
    "fp8 dense": ("fp8_gemm_nt",),
    "bf16 contig": ("m_grouped_bf16_gemm_nt_contiguous",),
    "bf16 masked": ("m_grouped_bf16_gemm_nt_masked", "bf16_m_grouped_gemm_nt_masked"),
    "bf16 dense": ("bf16_gemm_nt",),
}
"""What a product is called here -> what releases from 0.1.2 to 0.2.x call it."""


class DeepGemmError(RuntimeError):
    """The library is missing, or lacks a product under every name that it ever had."""


def library() -> ModuleType:
    """The module itself.

    Raises:
        DeepGemmError: there is none, or it does not load.
    """
    try:
        return import_module("deep_gemm")
    except ImportError as error:
        raise DeepGemmError(f"deep_gemm cannot be imported: {error}") from error


@cache
def _kernel(product: str) -> Callable[..., None]:
    """The library's function for a product.

    Raises:
        DeepGemmError: no such module, or no such function in it.
    """
    for name in _NAMES[product]:
        if hasattr(library(), name):
            found: Callable[..., None] = getattr(library(), name)
            return found
    version = getattr(library(), "__version__", "of unknown version")
    raise DeepGemmError(f"deep_gemm {version} has none of {', '.join(_NAMES[product])}")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepGemmMatrix:
    """Prepared weights as the kernels take them.

    operand  [L, N, K] bf16, or e4m3 codes with [L, N/128, K/128] fp32 scales
    """

    operand: Tensor | tuple[Tensor, Tensor]

    @property
    def values(self) -> Tensor:
        """[L, N, K] without scales."""
        return self.operand[0] if isinstance(self.operand, tuple) else self.operand

    @property
    def out_features(self) -> int:
        """N."""
        return self.values.shape[1]

    def expert(self, index: int) -> Tensor | tuple[Tensor, Tensor]:
        """One expert's operand: [N, K], and its scales."""
        if isinstance(self.operand, tuple):
            return self.operand[0][index], self.operand[1][index]
        return self.operand[index]


class DeepGemm:
    """The kernels that SGLang calls, on SM90: bf16, and e4m3 in groups of 128 with fp32 scales.

    Whole tiles are computed, so that rows which are nobody's may be written too: up to the next
    64 or 128 behind a slab's last row, and in a segment up to its end.

    Args:
        expected_m: the library's hint of how many rows of a slab are real; None: all of them.

    Source: DeepGEMM, deep_gemm/__init__.py; SGLang 0.5.21, deep_gemm_wrapper/entrypoint.py.
    """

    name = "deep_gemm"

    def __init__(self, expected_m: int | None = None) -> None:
        self._expected_m = expected_m

    def arithmetic(self, scale_format: ScaleFormat) -> ArithmeticModel:
        """As measured on an H200, by sums of big, small and -big."""
        return DEEP_GEMM_SM90 if scale_format is ScaleFormat.FP32 else TENSOR_CORES

    def load(self, matrix: ExpertMatrix) -> DeepGemmMatrix:
        """The tensors themselves: prepared weights are what the kernels read."""
        if matrix.scale is None:
            return DeepGemmMatrix(operand=matrix.values)
        return DeepGemmMatrix(operand=(matrix.values, matrix.scale))

    def grouped_gemm_nt_contig(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        m_indices: Tensor,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """See ``GemmBackend``."""
        assert isinstance(rhs, DeepGemmMatrix)
        out = _unwritten(lhs, lhs.shape[0], rhs.out_features)
        return _multiplied("contig", lhs, lhs_scale, rhs.operand, out, m_indices)

    def grouped_gemm_nt_masked(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        masked_m: Tensor,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """See ``GemmBackend``."""
        assert isinstance(rhs, DeepGemmMatrix)
        num_slabs, height = lhs.shape[:2]
        out = _unwritten(lhs, num_slabs, height, rhs.out_features)
        hint = height if self._expected_m is None else self._expected_m
        return _multiplied("masked", lhs, lhs_scale, rhs.operand, out, masked_m, hint)

    def gemm_nt(
        self,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        lhs_group: int = GROUP_SIZE,
    ) -> Tensor:
        """See ``GemmBackend``."""
        assert isinstance(rhs, DeepGemmMatrix)
        out = _unwritten(lhs, lhs.shape[0], rhs.out_features)
        return _multiplied("dense", lhs, lhs_scale, rhs.expert(0), out)


def _unwritten(lhs: Tensor, *shape: int) -> Tensor:
    return poison(lhs.new_empty(shape, dtype=torch.bfloat16))


def _multiplied(
    form: str,
    lhs: Tensor,
    lhs_scale: Tensor | None,
    rhs: Tensor | tuple[Tensor, Tensor],
    out: Tensor,
    *indices: Any,  # noqa: ANN401  what the form takes behind its result
) -> Tensor:
    """``out``, filled; no kernel is started for no rows."""
    if not out.numel():
        return out
    if lhs_scale is None:
        _kernel(f"bf16 {form}")(lhs, rhs, out, *indices)
    else:
        _kernel(f"fp8 {form}")((lhs, tma_aligned(lhs_scale)), rhs, out, *indices)
    return out

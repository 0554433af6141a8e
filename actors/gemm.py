"""The GEMM backend that ranks multiply with, and how many bits its sums were seen to keep."""

from functools import cache

from moe.arithmetic import AccumulatorWidths
from moe.formats import ScaleFormat
from moe.gemm_backend import GemmBackend
from moe.grouped_gemm import TorchGemm
from moe.width_ladder import measured_widths


def rank_gemm() -> GemmBackend:
    """A backend as each rank takes one."""
    return TorchGemm()


def widths_of(gemm: GemmBackend, scale_format: ScaleFormat) -> AccumulatorWidths:
    """Measured in this process, once for all backends of one class: they share their kernels."""
    return _measured(type(gemm), scale_format)


@cache
def _measured(backend: type[GemmBackend], scale_format: ScaleFormat) -> AccumulatorWidths:
    return measured_widths(backend(), scale_format)


def forget_widths() -> None:
    """Measure anew from now on: kernels were exchanged."""
    _measured.cache_clear()

"""The GEMM backend that ranks multiply with, and how many bits its sums were seen to keep."""

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Final

import torch

from moe.arithmetic import AccumulatorWidths
from moe.deep_gemm import DeepGemm
from moe.formats import ScaleFormat
from moe.gemm_backend import GemmBackend
from moe.grouped_gemm import TorchGemm
from moe.width_ladder import measured_widths

_BACKENDS: Final[Mapping[str, Callable[[str], GemmBackend]]] = MappingProxyType(
    {"torch": TorchGemm, "deep_gemm": lambda device: DeepGemm()}
)
"""Name -> a backend for a device."""


def gemm_backend(name: str, device: str = "cpu") -> GemmBackend:
    """A backend as each rank takes one, by its name, for the device where it multiplies."""
    return _BACKENDS[name](device)


@cache
def widths_of(name: str, scale_format: ScaleFormat, device: str = "cpu") -> AccumulatorWidths:
    """Measured in this process, once a backend and device."""
    with torch.device(device):
        return measured_widths(gemm_backend(name, device), scale_format)

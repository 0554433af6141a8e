"""The GEMM backend that ranks multiply with, and how many bits its sums were seen to keep."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Final

import torch

from moe.arithmetic import AccumulatorWidths
from moe.deep_gemm import DeepGemm
from moe.formats import ScaleFormat
from moe.gemm_backend import GemmBackend
from moe.grouped_gemm import TorchGemm
from moe.width_ladder import measured_widths
from scenarios.errors import UserError

_BACKENDS: Final[Mapping[str, Callable[[str], GemmBackend]]] = MappingProxyType(
    {"torch": TorchGemm, "deep_gemm": lambda device: DeepGemm()}
)
"""Name -> a backend for a device."""


_PROMISED: Final = (
    "arithmetic",
    "load",
    "grouped_gemm_nt_contig",
    "grouped_gemm_nt_masked",
    "gemm_nt",
)
"""What somebody's own backend has to have of ``GemmBackend``, beside a name."""


class BackendError(UserError):
    """A backend that cannot be imported, or is none."""


def gemm_backend(name: str, device: str = "cpu") -> GemmBackend:
    """A backend as each rank takes one, for the device where it multiplies.

    Args:
        name: torch, deep_gemm, or ``package.module:Class`` of somebody's own, which is called
            without arguments.
        device: cpu or cuda.

    Raises:
        BackendError: the class cannot be imported, or lacks what a backend promises.
    """
    return _imported(name) if is_imported(name) else _BACKENDS[name](device)


def is_imported(name: str) -> bool:
    """Whether a backend is named by where it is imported from."""
    return ":" in name


def _imported(path: str) -> GemmBackend:
    module, _, name = path.partition(":")
    try:
        made: GemmBackend = getattr(import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise BackendError(f"{path}: {error}") from error
    lacks = [method for method in _PROMISED if not callable(getattr(made, method, None))]
    if lacks:
        raise BackendError(f"{path} is no GEMM backend: it lacks {', '.join(lacks)}")
    return made


@cache
def widths_of(name: str, scale_format: ScaleFormat, device: str = "cpu") -> AccumulatorWidths:
    """Measured in this process, once a backend and device."""
    with torch.device(device):
        return measured_widths(gemm_backend(name, device), scale_format)

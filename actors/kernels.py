"""Who computes what stands between a rank's GEMMs; Triton is imported where it is named."""

from importlib import import_module

from moe.row_kernels import TORCH_KERNELS, RowKernels


def row_kernels(name: str) -> RowKernels:
    """The operations as each rank takes them.

    Args:
        name: torch or triton, as ``actors.machine.kernels_of`` resolved it.
    """
    if name == "torch":
        return TORCH_KERNELS
    kernels: RowKernels = import_module("moe.triton_kernels").TRITON_KERNELS
    return kernels

"""One real call of each thing that ranks may compute with; each in a process of its own.

    python -m actors.probes NAME

prints what was seen as its last line; whatever is raised is the reason why it cannot be used. A
library that loads proves nothing: some fail at the first call, and some end the process.
"""

import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist

from moe.deep_gemm import DeepGemm
from moe.formats import ScaleFormat
from moe.width_ladder import measured_widths


def ray() -> str:
    """Start a local cluster and one task."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    library: Any = import_module("ray")
    library.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    seen = library.get(library.remote(_process).remote())
    assert seen != os.getpid(), "a task ran in the process that asked for it"
    library.shutdown()
    return f"{library.__version__}, a task ran"


def gloo() -> str:
    """An all-reduce of a group of one."""
    return f"torch {torch.__version__}, {_all_reduced('gloo', 'cpu')}"


def cuda() -> str:
    """A product on each GPU, exact in fp32."""
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(256, 256, device=f"cuda:{index}")
        assert bool((ones @ ones == 256).all()), f"GPU {index}: ones @ ones is not 256"
    return f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPU(s) multiplied"


def nccl() -> str:
    """An all-reduce of a group of one on the first GPU."""
    module: Any = torch.cuda.nccl
    loaded = ".".join(str(part) for part in module.version())
    return f"{loaded} from {_library('libnccl')}, {_all_reduced('nccl', 'cuda')}"


def deep_gemm() -> str:
    """Products of all forms and formats, by the bits that their sums keep."""
    with torch.device("cuda"):
        bits = {
            name: measured_widths(DeepGemm(), kind)
            for name, kind in (("bf16", ScaleFormat.NONE), ("e4m3", ScaleFormat.FP32))
        }
    kept = ", ".join(
        f"{name} {one.in_block}/{one.across_blocks} bits" for name, one in bits.items()
    )
    return f"{version('sgl-deep-gemm')}, sums keep {kept}"


def deep_ep() -> str:
    """Load it; its calls take two GPUs, and a group of ranks."""
    library = import_module("deep_ep")
    has = [name for name in ("Buffer", "ElasticBuffer") if hasattr(library, name)]
    return f"loads with {', '.join(has)}; not called: that takes a group of ranks"


def _process() -> int:
    return os.getpid()


def _all_reduced(backend: str, device: str) -> str:
    types: Any = dist  # it does not export the store's type
    dist.init_process_group(
        backend, store=types.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    value = torch.full((8,), 3.0, device=device)
    dist.all_reduce(value)
    assert bool((value == 3).all()), "an all-reduce of one rank changed its value"
    dist.destroy_process_group()
    return "an all-reduce ran"


def _library(name: str) -> str:
    """Path of a shared library that this process has loaded."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if f"/{name}" in line}
    return ", ".join(sorted(paths)) or "where it is linked in"


PROBES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {probe.__name__: probe for probe in (ray, gloo, cuda, nccl, deep_gemm, deep_ep)}
)


if __name__ == "__main__":
    sys.stdout.write(PROBES[sys.argv[1]]() + "\n")

"""What this machine computes with: which device and GEMM a scenario gets, or why it gets none."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from shutil import which
from subprocess import run
from typing import Any, Final

import torch

from actors.gemm import BackendError, gemm_backend, is_imported
from moe.formats import ActivationKind, Platform
from scenarios.loader import LoadedScenario
from scenarios.rules import check_rules
from scenarios.schema import Scenario

TRANSPORTS: Final = {"cpu": "gloo", "cuda": "nccl"}
"""Device -> what torch.distributed moves its tensors with."""

_PLATFORM_OF: Final = {(9, 0): Platform.SM90, (10, 0): Platform.SM100, (12, 0): Platform.SM120}
"""CUDA compute capability -> platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What an axis of ``backends`` resolved to, and why."""

    name: str
    version: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """What torch sees of this machine's GPUs.

    count     how many
    platform  of the first one; None: none, or one that no scenario can name
    name      the product
    """

    count: int
    platform: Platform | None
    name: str


@cache
def gpus() -> Gpus:
    """Asked once a process."""
    if not torch.cuda.is_available():
        return Gpus(count=0, platform=None, name="none")
    return Gpus(
        count=torch.cuda.device_count(),
        platform=_PLATFORM_OF.get(torch.cuda.get_device_capability(0)),
        name=torch.cuda.get_device_name(0),
    )


@cache
def gpu_facts() -> dict[str, str | int]:
    """Versions around the GPUs, as far as a result depends on them; empty where there is none."""
    has = gpus()
    if not has.count:
        return {}
    nccl: Any = torch.cuda.nccl  # its functions have no types
    return {
        "gpus": has.count,
        "gpu": has.name,
        "cuda": torch.version.cuda or "unknown",
        "nccl": ".".join(str(part) for part in nccl.version()),
        "driver": _driver_version(),
    }


def _driver_version() -> str:
    """As nvidia-smi says it."""
    program = which("nvidia-smi")
    if program is None:
        return "unknown"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    done = run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def device_of(scenario: Scenario) -> Choice:
    """Where the ranks of a scenario compute."""
    asked, has = scenario.run.device, gpus()
    if asked != "auto":
        return Choice(name=asked, version=torch.__version__, reason="named in the scenario")
    if scenario.run.runtime == "loopback":
        reason = "auto: ranks of loopback share a process, and a GPU only where run.device says so"
    elif has.count < scenario.parallel.world_size:
        reason = f"auto: {has.count} GPU(s) here for {scenario.parallel.world_size} ranks"
    elif has.platform is not scenario.platform:
        reason = f"auto: {has.name} is not {scenario.platform}"
    else:
        return Choice(name="cuda", version=torch.__version__, reason=f"auto: {has.name}")
    return Choice(name="cpu", version=torch.__version__, reason=reason)


def gemm_of(loaded: LoadedScenario) -> Choice:
    """Who multiplies; ``auto`` takes no kernel that refuses a size."""
    scenario = loaded.scenario
    asked = scenario.run.backends.gemm
    if asked != "auto":
        return Choice(name=asked, version=_version_of(asked), reason="named in the scenario")
    if device_of(scenario).name == "cpu":
        reason = "auto: the reference GEMM; no GPU takes part"
    elif lacks := _deep_gemm_lacks(scenario) or _refused_size(loaded):
        reason = f"auto: the reference GEMM; {lacks}"
    else:
        return Choice(
            name="deep_gemm", version=_version_of("deep_gemm"), reason="auto: SGLang's own"
        )
    return Choice(name="torch", version=torch.__version__, reason=reason)


def kernels_of(loaded: LoadedScenario) -> Choice:
    """Who computes what stands between the GEMMs."""
    asked = loaded.scenario.run.backends.kernels
    if asked != "auto":
        return Choice(name=asked, version=_version_of(asked), reason="named in the scenario")
    if device_of(loaded.scenario).name == "cpu":
        reason = "auto: permutes and quantisers in torch; no GPU takes part"
    elif lacks := _triton_lacks(loaded):
        reason = f"auto: permutes and quantisers in torch; {lacks}"
    else:
        return Choice(
            name="triton", version=_version_of("triton"), reason="auto: kernels, as SGLang has"
        )
    return Choice(name="torch", version=torch.__version__, reason=reason)


def transport_of(scenario: Scenario) -> str:
    """What moves bytes between the ranks."""
    if scenario.run.runtime == "loopback":
        return "loopback"
    return TRANSPORTS[device_of(scenario).name]


def lacking(loaded: LoadedScenario) -> list[str]:
    """What a scenario names and this machine has not."""
    scenario = loaded.scenario
    has, reasons = gpus(), []
    device = device_of(scenario).name
    needed = 1 if scenario.run.runtime == "loopback" else scenario.parallel.world_size
    if device == "cuda" and has.count < needed:
        reasons.append(f"run.device cuda needs {needed} GPU(s), torch sees {has.count} here")
    asked, takes = scenario.run.backends.transport, transport_of(scenario)
    if asked not in ("auto", takes):
        where = f"run.runtime {scenario.run.runtime} on run.device {device}"
        reasons.append(f"run.backends.transport {asked}: {where} moves bytes with {takes}")
    gemm = scenario.run.backends.gemm
    if is_imported(gemm):
        try:
            gemm_backend(gemm, device)
        except BackendError as error:
            reasons.append(f"run.backends.gemm {error}")
    if gemm == "deep_gemm":
        if device == "cpu":
            reasons.append("run.backends.gemm deep_gemm needs run.device cuda")
        elif lacks := _deep_gemm_lacks(scenario):
            reasons.append(f"run.backends.gemm deep_gemm: {lacks}")
    return reasons + _unusable_triton(loaded)


def _unusable_triton(loaded: LoadedScenario) -> list[str]:
    """Why named Triton kernels do not run here, in a list of one; empty: they do, or are not."""
    scenario = loaded.scenario
    if scenario.run.backends.kernels != "triton":
        return []
    lacks = _triton_lacks(loaded)
    if lacks is None and device_of(scenario).name == "cpu":
        lacks = _interpreter_lacks(scenario)
    return [f"run.backends.kernels triton: {lacks}"] if lacks else []


def _triton_lacks(loaded: LoadedScenario) -> str | None:
    """Why Triton has no kernels for a scenario; None: it has."""
    if find_spec("triton") is None:
        return "triton is not installed"
    kind = loaded.model.activation.kind
    if kind is not ActivationKind.SILU:
        return f"its activation is silu, and {loaded.model.name} has {kind}"
    return None


def _interpreter_lacks(scenario: Scenario) -> str | None:
    """Why Triton's interpreter cannot stand in for a GPU; None: it can."""
    if scenario.run.runtime != "loopback":
        return "it needs run.device cuda; its interpreter takes run.runtime loopback"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs run.device cuda, or TRITON_INTERPRET=1 for its interpreter on a CPU"
    return None


def _deep_gemm_lacks(scenario: Scenario) -> str | None:
    """Why DeepGEMM cannot multiply here; None: it can."""
    has = gpus()
    if find_spec("deep_gemm") is None:
        return "deep_gemm is not installed"
    if has.platform is not scenario.platform:
        return f"the scenario is of {scenario.platform}, and this GPU is {has.platform or has.name}"
    if scenario.platform is not Platform.SM90:
        return f"DeepGEMM on {scenario.platform} is not wired up in this version"
    return None


def _refused_size(loaded: LoadedScenario) -> str | None:
    """What real kernels refuse of the scenario's sizes; None: nothing."""
    moe = loaded.scenario.moe.model_copy(update={"strict_shapes": True})
    strict = loaded.scenario.model_copy(update={"moe": moe})
    problems = check_rules(strict, loaded.model).problems
    return f"{problems[0].field}: {problems[0].message}" if problems else None


def _version_of(backend: str) -> str:
    """Of the package that has a backend."""
    if backend == "torch":
        return torch.__version__
    if is_imported(backend):
        gemm_backend(backend)  # which says why it cannot be imported
        module = import_module(backend.partition(":")[0])
        return str(getattr(module, "__version__", "unknown"))
    try:
        return version({"deep_gemm": "sgl-deep-gemm"}.get(backend, backend))
    except PackageNotFoundError:
        return "unknown"


def name_of(device: str) -> str:
    """What a result says of a device; of a GPU its product and the number it was built with."""
    if device == "cpu":
        return device
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{facts.name} {facts.uuid}"


@contextmanager
def computing_on(device: str) -> Iterator[None]:
    """Inside, new tensors lie on the device, and its sums have one order each time.

    Args:
        device: cpu or cuda.
    """
    if device == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may not repeat
    was = torch.are_deterministic_algorithms_enabled()
    deterministic = import_module("torch.utils.deterministic")
    filled = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        with torch.device(device):
            yield
    finally:
        torch.use_deterministic_algorithms(was)
        deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]

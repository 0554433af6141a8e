"""What a run depends on beside its scenario's text: digests of files, and of the code itself."""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from scenarios.checkpoint_files import TensorReader, stored_tensors, tensor_files
from scenarios.checkpoint_names import find_layer
from scenarios.loader import LoadedScenario
from scenarios.sections import WeightsSpec

_ROOT: Final = Path(__file__).parents[1]
_CODE: Final = ("actors", "moe", "reports", "scenarios", "topology")
_NO_VERDICT: Final = "reports/html/"
"""Pages change no verdict."""


def sources_of(loaded: LoadedScenario) -> dict[str, str]:
    """Digests by what they are of: the code, captured inputs, the layer of a checkpoint.

    Args:
        loaded: its files are read whole; of a checkpoint, the tensors of its layer.

    Raises:
        CheckpointError: see ``tensor_files``.
    """
    scenario, found = loaded.scenario, {"code": code_digest()}
    if scenario.inputs.path is not None:
        found["inputs.path"] = _digest([Path(scenario.inputs.path).read_bytes()])
    if scenario.model.weights.path is not None:
        found["model.weights"] = _digest(_contents_of_layer(scenario.model.weights))
    return found


@cache
def code_digest() -> str:
    """Of every module that runs or judges, names included."""
    files = sorted(file for package in _CODE for file in (_ROOT / package).rglob("*.py"))
    named = [(file.relative_to(_ROOT).as_posix(), file) for file in files]
    return _digest(
        part
        for name, file in named
        if not name.startswith(_NO_VERDICT)
        for part in (name.encode(), file.read_bytes())
    )


def _contents_of_layer(spec: WeightsSpec) -> Iterator[bytes]:
    """Names, forms and bytes of the tensors of a layer, one after the other."""
    assert spec.path is not None
    assert spec.layer is not None, "the schema demands path and layer with kind safetensors"
    checkpoint = Path(spec.path)
    files = tensor_files(checkpoint)
    names = find_layer(files, spec.layer, checkpoint).names.values()
    stored, _ = stored_tensors({name: files[name] for name in names})
    with TensorReader() as reader:
        for name, tensor in sorted(stored.items()):
            yield f"{name} {tensor.dtype} {tensor.shape}".encode()
            yield _bytes_of(reader.read(tensor))


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterator[bytes] | list[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()

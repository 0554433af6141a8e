"""Tokens and weights of a scenario in files, exactly as they were drawn or read.

Of a folder, ``tokens_<mode>.safetensors`` holds a batch and ``weights_<mode>.safetensors`` a layer:
its matrices as a checkpoint of the recipe has them, and what they were before any rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe.batch import Batch
from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights, WeightSource
from scenarios.errors import InputError
from scenarios.models import MoeModel

_NARROW: Final = (torch.bfloat16, torch.float32)
_BOTH: Final = ("w13", "w2")
_COMMON: Final = ("gate_weight", "correction_bias", "tid2eid")

Named = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The weights in one file. See ``moe.weights.WeightSource``.

    file      safetensors, as ``store_weights`` writes them
    is_exact  made so that sums are exact
    """

    file: Path
    is_exact: bool

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """Checkpoint tensors of these logical experts."""
        with _opened(self.file) as stored:
            experts = stored.gated_mlp("experts", expert_ids)
        assert experts is not None, "a layer was stored with its experts"
        return experts

    def common(self) -> CommonWeights:
        """What every rank holds."""
        with _opened(self.file) as stored:
            shared = stored.gated_mlp("shared", [0])
            gate, bias, table = (stored.tensor(name) for name in _COMMON)
        assert gate is not None, "a layer was stored with its router"
        return CommonWeights(shared=shared, gate_weight=gate, correction_bias=bias, tid2eid=table)

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """(w13 [2I, H], w2 [H, I]) float64 of one expert."""
        ideal = self._ideal(f"experts.{expert_id}")
        assert ideal is not None, "every expert was stored"
        return ideal

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """The same for the shared expert."""
        return self._ideal("shared")

    def _ideal(self, owner: str) -> tuple[Tensor, Tensor] | None:
        with _opened(self.file) as stored:
            w13, w2 = (stored.tensor(f"{owner}.ideal_{name}") for name in _BOTH)
        if w13 is None or w2 is None:
            return None
        return w13.to(torch.float64), w2.to(torch.float64)


def weights_file(folder: Path, mode: str) -> Path:
    """Where the weights of a mode lie."""
    return folder / f"weights_{mode}.safetensors"


def tokens_file(folder: Path, mode: str) -> Path:
    """Where the tokens of a mode lie."""
    return folder / f"tokens_{mode}.safetensors"


def stored_weights(folder: Path, mode: str, model: MoeModel) -> StoredWeights:
    """The weights of a mode, which are of a layer of the model's sizes.

    Raises:
        InputError: no such file, or a layer of other sizes.
    """
    weights = StoredWeights(file=weights_file(folder, mode), is_exact=mode == "exact")
    wanted = {
        "gate_weight": [model.n_routed_experts, model.hidden_size],
        "experts.0.ideal_w2": [model.hidden_size, model.moe_intermediate_size],
    }
    with _opened(weights.file) as stored:
        for name, shape in wanted.items():
            _expect(weights.file, name, stored.tensor(name), shape)
    return weights


def stored_batch(folder: Path, mode: str, num_tokens: int, hidden_size: int) -> Batch:
    """The tokens of a mode.

    Raises:
        InputError: no such file, or tokens of another number or width.
    """
    file = tokens_file(folder, mode)
    with _opened(file) as stored:
        found = {field.name: stored.tensor(field.name) for field in fields(Batch)}
    rows = _expect(file, "hidden_states", found.pop("hidden_states"), [num_tokens, hidden_size])
    return Batch(hidden_states=rows, **found)


def _expect(file: Path, name: str, tensor: Tensor | None, shape: list[int]) -> Tensor:
    """The tensor, which has this shape.

    Raises:
        InputError: it has not, or there is none.
    """
    if tensor is not None and list(tensor.shape) == shape:
        return tensor
    found = "missing" if tensor is None else list(tensor.shape)
    raise InputError(f"{file}: {name} is {found}; the scenario wants {shape}")


def store_batch(batch: Batch, folder: Path, mode: str) -> None:
    """Write the tokens of a mode.

    Raises:
        SafetensorError: the file could not be written.
    """
    given = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: _apart(tensor) for name, tensor in given.items() if tensor is not None}
    save_file(tensors, tokens_file(folder, mode))


def store_weights(source: WeightSource, num_experts: int, folder: Path, mode: str) -> None:
    """Write all weights of a mode.

    Raises:
        SafetensorError: the file could not be written.
    """
    common, every = source.common(), source.experts(range(num_experts))
    owners = {"experts": every} | ({} if common.shared is None else {"shared": common.shared})
    matrices = {
        f"{owner}.{name}": getattr(mlp, name) for owner, mlp in owners.items() for name in _BOTH
    }
    tensors = {name: tensor for name in _COMMON if (tensor := getattr(common, name)) is not None}
    for name, matrix in matrices.items():
        tensors[f"{name}.values"] = matrix.values
        if matrix.scale is not None:
            tensors[f"{name}.scale"] = matrix.scale
    tensors |= dict(_ideals(source, num_experts))
    save_file(
        {name: _apart(tensor) for name, tensor in tensors.items()},
        weights_file(folder, mode),
        {name: str(matrix.group_size) for name, matrix in matrices.items()},
    )


def _apart(tensor: Tensor) -> Tensor:
    """A copy without gaps that shares no memory: all that safetensors takes."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _ideals(source: WeightSource, num_experts: int) -> Named:
    """What the experts were before any rounding, in as few bits as hold it."""
    ideals = {f"experts.{expert}": source.ideal_expert(expert) for expert in range(num_experts)}
    shared = source.ideal_shared()
    for owner, pair in (ideals | ({} if shared is None else {"shared": shared})).items():
        for name, ideal in zip(_BOTH, pair, strict=True):
            yield f"{owner}.ideal_{name}", _narrowed(ideal)


def _narrowed(values: Tensor) -> Tensor:
    """The same values in the narrowest dtype that has them all."""
    narrow = (values.to(dtype) for dtype in _NARROW)
    return next((one for one in narrow if torch.equal(one.to(values.dtype), values)), values)


class _Stored:
    """An open file of named tensors, which come on torch's default device."""

    def __init__(self, tensors: Any) -> None:  # noqa: ANN401  untyped by its makers
        self._tensors = tensors
        self._names = frozenset(tensors.keys())

    def tensor(self, name: str) -> Tensor | None:
        """None where the file has no such tensor."""
        if name not in self._names:
            return None
        tensor: Tensor = self._tensors.get_tensor(name)
        return tensor.to(torch.get_default_device())

    def gated_mlp(self, owner: str, expert_ids: Sequence[int]) -> ExpertWeights | None:
        """The matrices of some experts; None where there are none."""
        w13, w2 = (self._matrix(f"{owner}.{name}", list(expert_ids)) for name in _BOTH)
        return None if w13 is None or w2 is None else ExpertWeights(w13=w13, w2=w2)

    def _matrix(self, name: str, experts: list[int]) -> ExpertMatrix | None:
        values, scale = (self.tensor(f"{name}.{part}") for part in ("values", "scale"))
        if values is None:
            return None
        return ExpertMatrix(
            values=values[experts],
            scale=None if scale is None else scale[experts],
            group_size=int(self._tensors.metadata()[name]),
        )


@contextmanager
def _opened(file: Path) -> Iterator[_Stored]:
    """A file that is closed when the block ends.

    Raises:
        InputError: it is not there, or no safetensors.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            yield _Stored(tensors)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: cannot be read as safetensors: {error}") from error

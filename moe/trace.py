"""What a run left behind: the tensors of every stage on every rank, as a value.

A tensor's name is the path of fields that holds it in the stage's value, so
``DeepEpNormalDispatchOutput.handle.source_row`` is ``handle.source_row`` of stage ``dispatch``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe.formats import Stage

V = TypeVar("V")
StageTensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankTrace:
    """Stage tensors of one rank in one forward."""

    rank: int
    stages: Mapping[Stage, StageTensors]

    def __getitem__(self, stage: Stage) -> StageTensors:
        return self.stages[stage]


class InputOverwrittenError(RuntimeError):
    """A stage wrote into a tensor it was given."""


class RecordingTap:
    """Keeps every stage's tensors; nothing is copied, so nothing may be written into later.

    Args:
        earlier: a recorder whose tensors must stay as they are, too.
    """

    def __init__(self, earlier: "RecordingTap | None" = None) -> None:
        self.stages: dict[Stage, dict[str, Tensor]] = {}
        self._versions: list[tuple[Stage, str, Tensor, int]] = []
        if earlier is not None:
            self._versions += earlier._versions

    def __call__(self, stage: Stage, value: V) -> V:
        """Record ``value`` and pass it on.

        Raises:
            InputOverwrittenError: ``stage`` changed what an earlier stage handed over.
        """
        for origin, name, tensor, version in self._versions:
            if tensor._version != version:
                raise InputOverwrittenError(f"stage {stage} wrote into {origin}/{name}")
        tensors = dict(named_tensors(value))
        self.stages[stage] = tensors
        self._versions += [(stage, name, t, t._version) for name, t in tensors.items()]
        return value

    def trace(self, rank: int) -> RankTrace:
        """What was seen so far, as one rank's trace."""
        return RankTrace(rank=rank, stages=self.stages)


def named_tensors(value: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a stage value with the path of fields that leads to it."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif is_dataclass(value):
        for field in fields(value):
            path = f"{prefix}.{field.name}" if prefix else field.name
            yield from named_tensors(getattr(value, field.name), path)


def save_traces(traces: Sequence[RankTrace], folder: Path) -> None:
    """Write one safetensors file a rank with tensors named ``<stage>/<rank>/<name>``.

    safetensors holds row-major data only; the strides of others stand in the file's metadata
    under the tensor's name, so that layouts can still be judged after loading.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        tensors = {
            f"{stage}/{trace.rank}/{name}": tensor
            for stage, named in trace.stages.items()
            for name, tensor in named.items()
        }
        row_major = {
            key: tensor.clone(memory_format=torch.contiguous_format)
            for key, tensor in tensors.items()
        }
        # is_contiguous() says nothing here: it overlooks the odd stride of a single column.
        strides = {
            key: ",".join(map(str, tensor.stride()))
            for key, tensor in tensors.items()
            if tensor.stride() != row_major[key].stride()
        }
        save_file(row_major, folder / f"rank_{trace.rank:05d}.safetensors", metadata=strides)


def load_traces(folder: Path) -> list[RankTrace]:
    """Read every tensor named ``<stage>/<rank>/<name>`` in the safetensors files of a folder.

    Raises:
        ValueError: no such file, a name of another form, or an unknown stage.
    """
    ranks: dict[int, dict[Stage, dict[str, Tensor]]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no .safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            strides = tensors.metadata() or {}
            for key in tensors.keys():  # noqa: SIM118  not a mapping
                stage, rank, name = _parse_key(file, key)
                tensor = _with_strides(tensors.get_tensor(key), strides.get(key))
                ranks.setdefault(rank, {}).setdefault(stage, {})[name] = tensor
    return [RankTrace(rank=rank, stages=ranks[rank]) for rank in sorted(ranks)]


def _with_strides(tensor: Tensor, strides: str | None) -> Tensor:
    """``tensor`` in the memory layout it was saved from; padding between columns is zero."""
    if strides is None:
        return tensor
    stride = tuple(map(int, strides.split(",")))
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    storage = torch.zeros(max(extent, 0), dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, stride).copy_(tensor)


def _parse_key(file: Path, key: str) -> tuple[Stage, int, str]:
    stage, _, rest = key.partition("/")
    rank, _, name = rest.partition("/")
    if stage not in list(Stage) or not rank.isdigit() or not name:
        raise ValueError(
            f"{file}: tensor {key!r} is not named <stage>/<rank>/<name> with a stage of "
            f"{', '.join(Stage)}"
        )
    return Stage(stage), int(rank), name

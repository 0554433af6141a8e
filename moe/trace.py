"""What a run left behind: the tensors of every stage on every rank, as a value.

A tensor's name is the path of fields that holds it in the stage's value, so
``DeepEpNormalDispatchOutput.handle.source_row`` is ``handle.source_row`` of stage ``dispatch``.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Final, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe.formats import Stage

V = TypeVar("V")
StageTensors = Mapping[str, Tensor]

_STRIDES: Final = "strides"
_OTHERS_ROW_MAJOR: Final = "under the names of tensors that are not row-major"
"""Entry of a file's metadata: whoever wrote the file knew of strides."""

_LARGEST_GAP: Final = 16
"""Cells that a layout may leave unused behind an axis, as alignment does."""


class TraceFilesError(ValueError):
    """Files that hold no traces; every problem found.

    Args:
        problems: a sentence each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankTrace:
    """Stage tensors of one rank in one forward.

    has_strides  the tensors lie in memory as they did in the forward
    """

    rank: int
    stages: Mapping[Stage, StageTensors]
    has_strides: bool = True

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
    else:
        for name in field_names(value):
            path = f"{prefix}.{name}" if prefix else name
            yield from named_tensors(getattr(value, name), path)


def field_names(value: object) -> tuple[str, ...]:
    """Names of a dataclass value's fields, in order; none of another value."""
    return _names_of(cast("Hashable", type(value)))  # as every type is


@cache
def _names_of(kind: Hashable) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind)) if is_dataclass(kind) else ()


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
        save_file(
            row_major,
            folder / f"rank_{trace.rank:05d}.safetensors",
            metadata={**strides, _STRIDES: _OTHERS_ROW_MAJOR},
        )


def load_traces(folder: Path) -> list[RankTrace]:
    """Read every tensor named ``<stage>/<rank>/<name>`` in the safetensors files of a folder.

    Raises:
        TraceFilesError: no such file, or files and tensors that cannot be read; all of them.
    """
    files = sorted(folder.glob("*.safetensors"))
    problems = [] if files else [f"{folder}: no .safetensors file"]
    ranks: dict[int, dict[Stage, dict[str, Tensor]]] = {}
    without_strides = set()
    for file in files:
        read = _read(file)
        problems += read.problems
        for (stage, rank, name), tensor in read.tensors.items():
            named = ranks.setdefault(rank, {}).setdefault(stage, {})
            if name in named:
                problems.append(f"{file}: tensor '{stage}/{rank}/{name}' is in another file, too")
            named[name] = tensor
            if not read.has_strides:
                without_strides.add(rank)
    if problems:
        raise TraceFilesError(problems)
    return [
        RankTrace(rank=rank, stages=ranks[rank], has_strides=rank not in without_strides)
        for rank in sorted(ranks)
    ]


_Key = tuple[Stage, int, str]


@dataclass(slots=True)
class _File:
    """What a file holds, and what is wrong with it."""

    tensors: dict[_Key, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    has_strides: bool = False


def _read(file: Path) -> _File:
    """Every tensor of a file whose name and strides can be read."""
    read = _File()
    try:
        with safe_open(file, framework="pt") as opened:
            strides = opened.metadata() or {}
            read.has_strides = _STRIDES in strides
            for key in opened.keys():  # noqa: SIM118  not a mapping
                try:
                    tensor = _with_strides(opened.get_tensor(key), strides.get(key))
                    read.tensors[_parse_key(key)] = tensor
                except ValueError as error:
                    read.problems.append(f"{file}: tensor {key!r} {error}")
    except (SafetensorError, OSError) as error:
        read.problems.append(f"{file}: no safetensors file ({error})")
    return read


def _with_strides(tensor: Tensor, strides: str | None) -> Tensor:
    """``tensor`` in the memory layout it was saved from; padding between columns is zero.

    Raises:
        ValueError: no strides of a layout in which every cell has a place of its own.
    """
    if strides is None:
        return tensor
    stride = _parse_strides(tensor, strides)
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, stride, strict=True))
    storage = torch.zeros(max(extent, 0), dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, stride).copy_(tensor)


def _parse_strides(tensor: Tensor, strides: str) -> tuple[int, ...]:
    """Numbers, one an axis: each at least what the axes of smaller steps take, not much more."""
    words = strides.split(",") if strides else []
    if len(words) == tensor.dim() and all(word.isdecimal() and len(word) < 16 for word in words):
        stride = tuple(map(int, words))
        taken = 1
        for step, size in sorted(zip(stride, tensor.shape, strict=True)):
            if size > 1 and not taken <= step <= taken + _LARGEST_GAP:
                break
            taken = max(taken, step * size)
        else:
            return stride
    raise ValueError(f"{list(tensor.shape)} cannot have strides {strides!r}")


def _parse_key(key: str) -> _Key:
    stage, _, rest = key.partition("/")
    rank, _, name = rest.partition("/")
    if stage not in list(Stage) or not (rank.isascii() and rank.isdecimal()) or not name:
        stages = ", ".join(Stage)
        raise ValueError(f"is not named <stage>/<rank>/<name> with a stage of {stages}")
    return Stage(stage), int(rank[:18]), name

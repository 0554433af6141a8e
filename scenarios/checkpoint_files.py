"""Safetensors files: which one holds a tensor, what its header says, its values."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scenarios.errors import UserError

_INDEX_SUFFIX: Final = ".safetensors.index.json"
_FILE_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True, slots=True)
class TensorProblem:
    """One thing in a checkpoint that is not as wanted.

    file     what holds it; "" if nothing does
    tensor   full name; "" is the file as a whole
    message  what was read, what is wanted
    """

    file: str
    tensor: str
    message: str


class CheckpointError(UserError):
    """A checkpoint that does not hold the layer as wanted; ``problems`` has all that was found."""

    def __init__(self, checkpoint: str, problems: Sequence[TensorProblem]) -> None:
        super().__init__(checkpoint, tuple(problems))
        self.checkpoint = checkpoint
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [f"{self.checkpoint}: {len(self.problems)} problem(s)"]
        return "\n".join(lines + [f"  {line}" for line in _folded(self.problems)])


def _folded(problems: Sequence[TensorProblem]) -> list[str]:
    """One line a problem; the same problem of several experts is one line."""
    alike: dict[tuple[str, str], list[TensorProblem]] = {}
    for problem in problems:
        any_expert = re.sub(r"\.experts\.\d+\.", ".experts.*.", problem.tensor)
        alike.setdefault((any_expert, problem.message), []).append(problem)
    return [_line(first, len(rest)) for first, *rest in alike.values()]


def _line(problem: TensorProblem, num_more: int) -> str:
    parts = (problem.file, problem.tensor, problem.message)
    more = f" (and {num_more} more like it)" if num_more else ""
    return ": ".join(part for part in parts if part) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a file's header describes it; ``dtype`` in safetensors' words (BF16, F8_E4M3)."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


class _Slice(Protocol):
    """A tensor whose header is read and whose values are not, until it is indexed."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: int) -> Tensor: ...


class _OpenFile(Protocol):
    """What ``safe_open`` gives, which has no types of its own."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


def tensor_files(checkpoint: Path) -> dict[str, Path]:
    """Tensor name to the file that holds it.

    Args:
        checkpoint: a ``.safetensors`` file, a ``.safetensors.index.json``, or a directory with one
            of them; a directory's index goes before its files.

    Raises:
        CheckpointError: none or several of them, unreadable, or of another kind.
    """
    path = _sole_entry(checkpoint) if checkpoint.is_dir() else checkpoint
    if path.name.endswith(_INDEX_SUFFIX):
        return _indexed_files(path)
    if path.suffix == _FILE_SUFFIX:
        with _opened(path) as tensors:
            return dict.fromkeys(tensors.keys(), path)
    raise _unusable(path, f"wanted *{_FILE_SUFFIX}, *{_INDEX_SUFFIX}, or a directory with one")


def stored_tensors(
    files: Mapping[str, Path],
) -> tuple[dict[str, StoredTensor], list[TensorProblem]]:
    """What the headers say of these tensors, and what is wrong with the files; reads no values.

    Args:
        files: tensor name to file, as of ``tensor_files``.
    """
    names_of: dict[Path, list[str]] = {}
    for name, file in files.items():
        names_of.setdefault(file, []).append(name)
    stored: dict[str, StoredTensor] = {}
    problems: list[TensorProblem] = []
    for file, names in names_of.items():
        try:
            with _opened(file) as tensors:
                present = set(tensors.keys())
                stored |= {name: _header(tensors, file, name) for name in names if name in present}
        except CheckpointError as error:
            problems += error.problems
            continue
        missing = [name for name in names if name not in present]
        problems += [
            TensorProblem(str(file), name, "the index puts it here; it is not") for name in missing
        ]
    return stored, problems


class TensorReader:
    """Reads single tensors, each file opened once; for use in a ``with`` block."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._open: dict[str, _OpenFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, tensor: StoredTensor, index: int | None = None) -> Tensor:
        """The values of a tensor, or of one entry of its first axis, on the default device.

        Raises:
            CheckpointError: the file or the tensor is gone.
        """
        if tensor.file not in self._open:
            self._open[tensor.file] = self._stack.enter_context(_opened(Path(tensor.file)))
        tensors = self._open[tensor.file]
        try:
            name, device = tensor.name, torch.get_default_device()
            if index is None:
                return tensors.get_tensor(name).to(device)
            return tensors.get_slice(name)[index].to(device)
        except SafetensorError as error:
            problem = TensorProblem(tensor.file, tensor.name, f"cannot be read: {error}")
            raise CheckpointError(tensor.file, [problem]) from error


@contextmanager
def _opened(path: Path) -> Iterator[_OpenFile]:
    try:
        tensors = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise _unusable(path, f"cannot be read as safetensors: {error}") from error
    with tensors as opened:
        yield opened


def _header(tensors: _OpenFile, file: Path, name: str) -> StoredTensor:
    header = tensors.get_slice(name)
    return StoredTensor(
        file=str(file), name=name, shape=tuple(header.get_shape()), dtype=header.get_dtype()
    )


def _sole_entry(directory: Path) -> Path:
    for suffix in (_INDEX_SUFFIX, _FILE_SUFFIX):
        found = sorted(directory.glob(f"*{suffix}"))
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(path.name for path in found)
            raise _unusable(directory, f"holds several *{suffix}, name one: {names}")
    raise _unusable(directory, f"holds no *{_FILE_SUFFIX} and no *{_INDEX_SUFFIX}")


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _unusable(index, f"cannot be read as JSON: {error}") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise _unusable(index, "wanted an object weight_map of tensor names to file names")
    return {name: index.parent / file for name, file in files.items()}


def _unusable(path: Path, message: str) -> CheckpointError:
    return CheckpointError(str(path), [TensorProblem(str(path), "", message)])

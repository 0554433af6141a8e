"""From the PATH arguments of the command line to scenario files."""

import glob
from collections.abc import Sequence
from pathlib import Path

from scenarios.errors import Problem, ScenarioError


def expand_paths(paths: Sequence[str | Path]) -> list[Path]:
    """The files that the arguments name, in their order, each once.

    Args:
        paths: files, directories (every ``*.yaml`` below them) and globs (the ``*.yaml`` among
            their matches).

    Raises:
        ScenarioError: arguments that name no file, all of them.
    """
    found: dict[Path, None] = {}
    problems = []
    for argument in map(str, paths):
        matches = _matches(argument)
        if not matches:
            problems.append(Problem(argument, _nothing(argument)))
        found.update(dict.fromkeys(matches))
    if problems:
        raise ScenarioError("arguments", problems)
    return list(found)


def _matches(argument: str) -> list[Path]:
    path = Path(argument)
    if path.exists():
        return _below(path) if path.is_dir() else [path]
    matches = sorted(Path(match) for match in glob.glob(argument, recursive=True))
    return [file for match in matches for file in _below(match)]


def _below(path: Path) -> list[Path]:
    files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    return [file for file in files if file.suffix == ".yaml" and file.is_file()]


def _nothing(argument: str) -> str:
    if Path(argument).is_dir():
        return "no *.yaml file in this directory"
    return "matches no *.yaml file" if glob.has_magic(argument) else "no such file or directory"

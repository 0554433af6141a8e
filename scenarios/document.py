"""Plain values with the place where each was written, and parts of them put elsewhere."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import JsonValue

from scenarios.errors import KeyPath, Origin, Problem, dotted


@dataclass(slots=True)
class Document:
    """What a YAML text holds.

    value     the tree, of JSON types alone
    origins   path -> line (1 is the first) or the option that set it
    hints     path -> how YAML read a plain scalar whose look suggests another type
    problems  what cannot be read at all
    """

    value: JsonValue = None
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    hints: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin | None:
        """Where the value at ``path``, or its nearest container, was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None

    def problem(self, path: KeyPath, message: str) -> Problem:
        """A problem at ``path``, with the place it was written and how YAML read it, if odd."""
        hint = self.hints.get(path)
        return Problem(dotted(path), f"{hint}; {message}" if hint else message, self.origin(path))

    def part(self, path: KeyPath) -> "Document":
        """A copy of the value at ``path``, with what is known of it; KeyError if there is none."""
        value: Any = self.value
        for key in path:
            value = value[key]
        return Document(
            value=deepcopy(value),
            origins=_below(path, self.origins),
            hints=_below(path, self.hints),
        )

    def put(self, path: KeyPath, part: "Document") -> None:
        """Set the value at ``path`` to a copy of another document's; sections on the way are made.

        Raises:
            ValueError: a value on the way holds no keys.
        """
        section: Any = self.value
        *parents, last = path
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ValueError(f"{parent!r} holds no keys")
        section[last] = deepcopy(part.value)
        _replace_below(path, self.origins, part.origins)
        _replace_below(path, self.hints, part.hints)


_Known = TypeVar("_Known")


def _below(path: KeyPath, known: Mapping[KeyPath, _Known]) -> dict[KeyPath, _Known]:
    """What is known at ``path`` and below, by the rest of its path."""
    length = len(path)
    return {key[length:]: what for key, what in known.items() if key[:length] == path}


def _replace_below(
    path: KeyPath, known: dict[KeyPath, _Known], new: Mapping[KeyPath, _Known]
) -> None:
    for stale in [key for key in known if key[: len(path)] == path]:
        del known[stale]
    known.update({path + below: what for below, what in new.items()})

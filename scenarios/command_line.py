"""What the command line adds to a scenario file: ``--set`` values and ``--inject`` faults."""

from collections.abc import Sequence

from pydantic import JsonValue

from scenarios.errors import KeyPath, Problem, shown
from scenarios.yaml_text import Document, read_value


def apply_sets(document: Document, assignments: Sequence[str]) -> None:
    """Put each ``a.b=VALUE`` into the tree; what cannot be put becomes a problem.

    Only the form is checked here: the schema judges names and values, as it does the file's.
    """
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        path: KeyPath = tuple(key.strip().split("."))
        read = read_value(text)
        if not equals or "" in path:
            _complain(document, f"{shown(assignment)} is no key=value")
        elif read.problems:
            _complain(document, f"{key.strip()}: {shown(text)} {read.problems[0].message}")
        else:
            _put(document, path, read)


def add_injects(document: Document, texts: Sequence[str]) -> None:
    """Add faults after the file's own."""
    assert isinstance(document.value, dict)
    own = document.value.setdefault("inject", [])
    if not isinstance(own, list):
        return  # the schema reports the file's value
    for text in texts:
        document.origins["inject", len(own)] = "--inject"
        own.append(text)


def _put(document: Document, path: KeyPath, read: Document) -> None:
    assert isinstance(document.value, dict)
    section: dict[str, JsonValue] = document.value
    *parents, last = map(str, path)
    for parent in parents:
        inner = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            _complain(document, f"{'.'.join(map(str, path))}: {parent!r} holds no keys")
            return
        section = inner
    section[last] = read.value
    _forget_below(document, path)
    document.origins[path] = "--set"
    document.hints.update({path + below: hint for below, hint in read.hints.items()})


def _forget_below(document: Document, path: KeyPath) -> None:
    """Drop the lines and hints of what the file held at ``path``."""
    for known in (document.origins, document.hints):
        for stale in [key for key in known if key[: len(path)] == path]:
            del known[stale]


def _complain(document: Document, message: str) -> None:
    document.problems.append(Problem("", message, "--set"))

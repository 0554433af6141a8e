"""What the command line adds to a scenario file: ``--set`` values and ``--inject`` faults."""

from collections.abc import Sequence

from scenarios.document import Document
from scenarios.errors import KeyPath, Problem, dotted, shown
from scenarios.yaml_text import read_value


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
    read.origins = {(): "--set"}
    try:
        document.put(path, read)
    except ValueError as error:
        _complain(document, f"{dotted(path)}: {error}")


def _complain(document: Document, message: str) -> None:
    document.problems.append(Problem("", message, "--set"))

"""Applies the code blocks of ``docs/new_format.md`` to a copy of the tree."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_BLOCK = re.compile(
    r"^(?:New file `(?P<file>[^`]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class NewFile:
    """A file in full."""

    path: str
    text: str

    def apply(self, root: Path) -> None:
        assert not (root / self.path).exists(), f"{self.path} is not new"
        (root / self.path).write_text(self.text)


@dataclass(frozen=True)
class Diff:
    """Lines of a file that stand there once, and what they become."""

    path: str
    before: str
    after: str

    def apply(self, root: Path) -> None:
        text = (root / self.path).read_text()
        found = text.count(f"\n{self.before}")
        assert found == 1, f"{self.path} has these lines {found} times:\n{self.before}"
        text = text.replace(f"\n{self.before}", f"\n{self.after}")
        (root / self.path).write_text(text)


def changes(page: str) -> Iterator[NewFile | Diff]:
    """Every block of a page that says which file it is for, in order."""
    for block in _BLOCK.finditer(page):
        if block["file"]:
            yield NewFile(block["file"], block["text"])
        elif block["language"] == "diff":
            yield _diff(block["text"])


def _diff(text: str) -> Diff:
    head, *lines = text.splitlines()
    path = head.removeprefix("--- ")
    assert path != head, f"a diff names its file first: {head}"
    assert {line[:1] for line in lines} <= {" ", "+", "-", ""}, text
    return Diff(
        path=path,
        before="".join(f"{line[1:]}\n" for line in lines if line[:1] != "+"),
        after="".join(f"{line[1:]}\n" for line in lines if line[:1] != "-"),
    )


def followed(page: str) -> list[tuple[list[str], str]]:
    """(arguments, output) of every ``python run.py`` in a shell block, output shown behind it."""
    blocks = list(_BLOCK.finditer(page))
    return [
        (shell["text"].split()[2:], output["text"])
        for shell, output in pairwise(blocks)
        if shell["text"].startswith("python run.py ") and output["language"] == "text"
    ]

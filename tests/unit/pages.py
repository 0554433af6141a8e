"""Reads the Markdown pages of the project: fenced blocks, tables, sections."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(*block) for block in found]


def table_rows(text: str) -> list[list[str]]:
    """Cells of every table row below a head, bare of backquotes."""
    rows = re.findall(r"^\| (?!---)(.*) ?\|$", text, re.MULTILINE)
    return [[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", row)] for row in rows]


def section(page: str, heading: str) -> str:
    """What stands below a heading, up to the next one of any level."""
    text = (ROOT / "docs" / page).read_text()
    assert text.count(f"\n{heading}\n") == 1, f"{page} has no one {heading!r}"
    return re.split(r"^#+ ", text.partition(f"\n{heading}\n")[2], flags=re.MULTILINE)[0]

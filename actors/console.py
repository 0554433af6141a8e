"""What commands print: tables and lines of progress; results go to stdout, all else to stderr."""

import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Column, Table

PIPED_WIDTH: Final = 160

stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def say(line: object) -> None:
    """A line of results, seen at once also through a pipe."""
    print(line, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without lines, as wide as the terminal, or as ``PIPED_WIDTH`` where there is none."""
    console = Console(
        highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED_WIDTH
    )
    head = [Column(column, overflow="fold") for column in columns]  # nothing is cut off
    table = Table(*head, title=title, title_justify="left", box=None)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()

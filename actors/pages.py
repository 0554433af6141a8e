"""``run.py report``: pages rendered again from JSON alone."""

from collections.abc import Sequence
from pathlib import Path

from actors.console import say
from reports.html.render import render
from reports.result_file import ResultError, read_result
from scenarios.errors import UserError


def render_again(results: Sequence[Path]) -> None:
    """Write each result's page beside it and print where; a bad file keeps no other from its page.

    Args:
        results: result.json files or their folders.

    Raises:
        UserError: all that could not be read or written.
    """
    wrong = []
    for path in results:
        file = path / "result.json" if path.is_dir() else path
        target = file.with_name("report.html")
        try:
            target.write_text(render(read_result(file)), encoding="utf-8")
            say(target)
        except ResultError as error:
            wrong.append(str(error))
        except OSError as error:
            wrong.append(f"{target}: {error.strerror}")
    if wrong:
        raise UserError("\n".join(wrong))

"""How a ``result.json`` is written and read."""

import json
import os
from pathlib import Path

from pydantic import ValidationError

from reports.record import Record
from reports.result import FORMAT, Result


class ResultError(ValueError):
    """A file that is not a result this version can read."""


def write_result(result: Record, path: Path) -> None:
    """Write a result as strict JSON; a reader sees the old file or the new one, never half.

    Args:
        result: what to write.
        path: file to create or replace; its folder must exist. A character that UTF-8 lacks (half
            of a surrogate pair, from a file name that is no text) is written as ``?``.
    """
    text = json.dumps(result.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text + "\n", encoding="utf-8", errors="replace")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_result(path: Path) -> Result:
    """Read what ``write_result`` wrote.

    Raises:
        ResultError: no file, not JSON, another format, or fields that do not fit; every problem
            is listed with its place in the file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return Result.model_validate_json(data)
    except ValidationError as error:
        problems = [f"  {_problem(entry['loc'], entry['msg'])}" for entry in error.errors()]
        head = f"{path}: {len(problems)} problem(s), is this a {FORMAT} file?"
        raise ResultError("\n".join([head, *problems])) from error


def _problem(location: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, location)) or 'file'}: {message}"

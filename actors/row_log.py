"""``rows.jsonl``: a line for every row that has run, on the disk before the next one starts."""

import hashlib
import json
import os
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from actors.output import OutputError
from reports.sweep_result import LoggedRow, RanRow
from scenarios.loader import LoadedScenario
from scenarios.sources import sources_of

FILE: Final = "rows.jsonl"


def row_digest(loaded: LoadedScenario) -> str:
    """Of all that a row's result depends on: its scenario, the code, the files that it reads."""
    said = [loaded.scenario.model_dump(mode="json"), sources_of(loaded)]
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


class RowLog:
    """The lines of one sweep's folder; only ever appended to, once it is open."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        """Open the log, empty or with what an earlier run left.

        Args:
            folder: of ``sweep.json``; exists.
            resume: keep the lines that are there; a last one without its end is cut off.

        Raises:
            OutputError: a file that cannot be read or written, or whose lines are none of these.
        """
        self._folder, self._path = folder, folder / FILE
        self._rows: dict[str, LoggedRow] = {}
        try:
            text = self._path.read_bytes() if resume and self._path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            self._rows = {row.row.name: row for row in map(self._read, whole.splitlines())}
            with self._path.open("ab") as file:
                file.truncate(len(whole))
        except OSError as error:
            raise OutputError(f"{self._path}: {error.strerror}") from error

    def ran(self, name: str, digest: str) -> RanRow | None:
        """The row, if it ran with this digest and its result is still there."""
        logged = self._rows.get(name)
        if logged is None or logged.digest != digest:
            return None
        result = logged.row.result
        return logged.row if result is None or (self._folder / result).is_file() else None

    def append(self, row: RanRow, digest: str) -> None:
        """Write a row's line; it is on the disk when this returns.

        Raises:
            OutputError: it cannot be written.
        """
        logged = LoggedRow(digest=digest, row=row)
        line = json.dumps(logged.model_dump(mode="json"), ensure_ascii=False, allow_nan=False)
        try:
            with self._path.open("ab") as file:
                file.write(line.encode(errors="replace") + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"{self._path}: {error.strerror}") from error

    def _read(self, line: bytes) -> LoggedRow:
        try:
            return LoggedRow.model_validate_json(line)
        except ValidationError as error:
            told = f"{self._path}: a line is no row of a sweep; run without --resume"
            raise OutputError(told) from error

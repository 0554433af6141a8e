"""``capsule.json``: the failure that a capsule holds, and where it comes from, as types."""

from pathlib import Path
from typing import Final, Literal

from pydantic import NonNegativeInt, ValidationError

from reports.failure import Failure
from reports.json_types import Items
from reports.record import Record
from reports.result import Divergence, Result

FORMAT: Final = "moe-assay-capsule/1"
FILE: Final = "capsule.json"

_PLACE: Final = (
    "mode",
    "round",
    "stage",
    "rank",
    "token",
    "slot",
    "expert",
    "columns",
    "tensor",
    "check",
)
_VALUES: Final = ("got", "want")


class Capsule(Record):
    """What a replay is held to, and what it was made from."""

    format: Literal["moe-assay-capsule/1"] = FORMAT
    semantics: Literal["sglang-0.5.21"] = "sglang-0.5.21"
    failure: Failure
    first_divergence: Divergence | None = None
    """With the values that have to come out again, bit by bit; null of a rank that failed."""
    shrunk_from: str
    """The command that ran the scenario in full."""
    went: Items[str] = ()
    """Steps from there to here."""
    candidates: NonNegativeInt
    """Scenarios that ran on the way."""
    refused: NonNegativeInt
    """Scenarios on the way that a rule refused."""
    ended_by: str = ""
    """The limit that ended the search before it was through; empty if none did."""
    code: str
    """Digest of the code that ran."""
    environment: dict[str, str | int]
    """Versions and machine."""


class CapsuleError(ValueError):
    """A file that is no capsule this version can read."""


def read_capsule(folder: Path) -> Capsule:
    """The capsule in a folder.

    Raises:
        CapsuleError: no such file, or fields that do not fit.
    """
    file = folder / FILE
    try:
        return Capsule.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise CapsuleError(f"{file}: no {FORMAT} file: {error}") from error


def parting(capsule: Capsule, result: Result, failure: Failure | None) -> str:
    """Where a replay parts from what the capsule holds, in words; "" if nowhere.

    Args:
        capsule: what is due.
        result: of the replay.
        failure: the way in which it failed, if it did.
    """
    due, found = capsule.first_divergence, result.first_divergence
    if due is None or found is None:
        return "" if failure == capsule.failure else f"{capsule.failure} is due"
    for name in _PLACE:
        if getattr(due, name) != getattr(found, name):
            return f"{name} {getattr(due, name)} is due, not {getattr(found, name)}"
    for name in _VALUES:
        one, other = getattr(due, name), getattr(found, name)
        if _bits(one) != _bits(other):
            return f"{name} {one!r} is due, bit for bit, not {other!r}"
    return ""


def _bits(value: float | None) -> str:
    """Of one float64; every NaN is the same, as JSON has it."""
    return "none" if value is None else value.hex()

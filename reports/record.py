"""What every part of a written result has in common, and the words that several parts use."""

from enum import StrEnum

from pydantic import BaseModel

from reports.json_types import RECORD


class Verdict(StrEnum):
    """What a whole run came to."""

    AGREE = "agree"
    DISCREPANCY = "discrepancy"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


class Mode(StrEnum):
    """Where the inputs came from, and with it how values are compared."""

    EXACT = "exact"
    RANDOM = "random"
    FILE = "file"


class Record(BaseModel):
    """Base of every part of a result: unknown keys refused, nothing coerced, nothing mutable."""

    model_config = RECORD

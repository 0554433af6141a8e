"""What a command's exit code says."""

from collections.abc import Sequence
from typing import Final, Protocol

OK, WRONG_VERDICT, BAD_INPUT, FAILED, UNSUPPORTED = range(5)
INTERRUPTED: Final = 130
"""Ctrl-C."""

TERMINATED: Final = 143
"""SIGTERM."""


class Told(Protocol):
    """A result, or what a sweep keeps of one."""

    @property
    def verdict(self) -> str: ...

    @property
    def as_expected(self) -> bool: ...


def exit_code(results: Sequence[Told]) -> int:
    """Of many results: a failure beats a wrong verdict, that beats 0, and 0 beats unsupported."""
    surprises = {str(result.verdict) for result in results if not result.as_expected}
    if "failed" in surprises:
        return FAILED
    if surprises & {"agree", "discrepancy"}:
        return WRONG_VERDICT
    if any(result.as_expected for result in results):
        return OK
    return UNSUPPORTED

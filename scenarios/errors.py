"""What is wrong with a scenario, in the words the user reads."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

KeyPath = tuple[str | int, ...]
Origin = int | str

_SHOWN_CHARACTERS: Final = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a scenario.

    field    the key, dotted; "" is the file as a whole
    message  what was read, what is allowed, the nearest match
    origin   line of the file (1 is the first), the option that set it, or None
    """

    field: str
    message: str
    origin: Origin | None = None

    def __str__(self) -> str:
        where = f"line {self.origin}" if isinstance(self.origin, int) else self.origin
        return ": ".join(part for part in (where, self.field, self.message) if part)


class UserError(Exception):
    """Something the user gave cannot be used; the message says what, and what to do."""


class InputError(UserError):
    """Captured or made inputs do not fit the scenario."""


class ScenarioError(UserError):
    """A scenario that cannot run anywhere; holds every problem found, in file order."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        super().__init__(source, tuple(problems))
        self.source = source
        self.problems = tuple(sorted(problems, key=_file_order))

    def __str__(self) -> str:
        lines = [f"{self.source}: {len(self.problems)} problem(s)"]
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])


def _file_order(problem: Problem) -> tuple[bool, int]:
    if isinstance(problem.origin, int):
        return False, problem.origin
    return problem.origin is not None, 0


def dotted(path: KeyPath) -> str:
    """``("batch", "tokens", 2)`` as ``batch.tokens[2]``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.removeprefix(".")


def shown(value: object) -> str:
    """A value as it stands in a message: quoted, cut, null spelled out."""
    if value is None:
        return "nothing (null)"
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}..."


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known word, or nothing if none is near."""
    return asked_back(difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6))


def asked_back(names: Sequence[str]) -> str:
    """``; did you mean 'x' or 'y'?``, or nothing without names."""
    quoted = " or ".join(repr(str(name)) for name in names)
    return f"; did you mean {quoted}?" if quoted else ""


def not_one_of(value: object, known: Iterable[str], meant: Sequence[str] = ()) -> str:
    """The message for a value outside a closed list, with what is meant or the nearest member."""
    options = list(known)
    guess = asked_back(meant) or did_you_mean(value, options)
    return f"{shown(value)} is not one of {', '.join(options)}{guess}"

"""A fault on the command line or in a scenario: ``FAULT[:param=value,...]``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import JsonValue

from scenarios.yaml_text import read_value

_FAULT_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_COMMA_OUTSIDE_BRACKETS: Final = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True, slots=True)
class FaultSpec:
    """A named fault and its parameters, as asked for; the fault itself checks the parameters."""

    name: str
    params: Mapping[str, JsonValue]


def parse_inject(text: str) -> FaultSpec:
    """Read one fault.

    Args:
        text: ``skip_combine`` or ``scale_rows:rank=3,experts=[1,2]``; values are YAML scalars
            or flat lists.

    Raises:
        ValueError: no fault name, a piece that is no ``param=value``, a repeated parameter.
    """
    name, colon, rest = text.strip().partition(":")
    if not _FAULT_NAME.fullmatch(name):
        raise ValueError(f"{text!r} is no fault: FAULT[:param=value,...]")
    if colon and not rest:
        raise ValueError(f"{text!r} ends in ':'; parameters follow it, or leave it out")
    params: dict[str, JsonValue] = {}
    for piece in _COMMA_OUTSIDE_BRACKETS.split(rest) if rest else ():
        param, value = _parse_param(piece)
        if param in params:
            raise ValueError(f"{text!r} gives {param!r} twice")
        params[param] = value
    return FaultSpec(name, params)


def _parse_param(piece: str) -> tuple[str, JsonValue]:
    param, equals, text = piece.partition("=")
    param = param.strip()
    if not equals or not param.isidentifier():
        raise ValueError(f"{piece!r} is no param=value")
    read = read_value(text)
    if read.problems or read.hints:
        reasons = [problem.message for problem in read.problems] + list(read.hints.values())
        raise ValueError(f"the value of {param!r}: {reasons[0]}")
    value = read.value
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, bool | int | float | str | None) for item in items):
        raise ValueError(f"the value of {param!r} is no scalar or flat list: {text!r}")
    return param, value

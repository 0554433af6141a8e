"""A sweep as types: a base scenario, the axes that vary it, rows left out on purpose."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import yaml
from pydantic import JsonValue

from scenarios.document import Document
from scenarios.yaml_text import read_value

_VALUE_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisValue:
    """One value of an axis.

    name     what rows call it
    written  how ``--set AXIS=...`` names it
    sets     dotted key -> value
    """

    name: str
    written: str
    sets: Mapping[str, Document]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What varies.

    name    the key itself, or what several keys that vary together are called
    is_key  whether it is the former
    values  in the order of the file
    """

    name: str
    is_key: bool
    values: tuple[AxisValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """Rows left out: those whose value on each axis of ``where`` is among the named ones."""

    where: Mapping[str, frozenset[str]]
    because: str

    def covers(self, values: Mapping[str, str]) -> bool:
        """Whether a row, given as axis -> name of its value, is left out."""
        return all(values[axis] in names for axis, names in self.where.items())


class Strategy(StrEnum):
    """Which rows of the product run."""

    ALL = "all"
    PAIRS = "pairs"
    TRIPLES = "triples"


STRENGTHS: Final[Mapping[Strategy, int]] = {Strategy.PAIRS: 2, Strategy.TRIPLES: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep file.

    path        where it lies
    name        results are filed under it
    about       one line for readers
    base        a scenario without its name, with the places where it was written
    axes        in the order of the file; the last varies fastest
    exclusions  what is left out of the product
    strategy    which rows of the product run
    salt        other ones choose other rows, where not all run
    seeds       the axis ``inputs.seed``, once through for every row that is chosen; or None
    """

    path: Path
    name: str
    about: str
    base: Document
    axes: tuple[Axis, ...]
    exclusions: tuple[Exclusion, ...]
    strategy: Strategy = Strategy.ALL
    salt: int = 0
    seeds: Axis | None = None

    @property
    def all_axes(self) -> tuple[Axis, ...]:
        """The axes, and the seeds behind them."""
        return self.axes if self.seeds is None else (*self.axes, self.seeds)


def is_value_name(text: str) -> bool:
    """Whether a value can be called so: its name becomes a part of a folder's."""
    return _VALUE_NAME.fullmatch(text) is not None


def name_of(value: JsonValue) -> str | None:
    """``fp8_block128``, ``true`` or, of a list, ``7-0-5``; None for what needs a given name."""
    if isinstance(value, list):
        names = [None if isinstance(item, list) else name_of(item) for item in value]
        return "-".join(map(str, names)) if names and None not in names else None
    if value is None or isinstance(value, dict):
        return None
    name = str(value).lower() if isinstance(value, bool) else str(value)
    return name if is_value_name(name) else None


def value_of_key(key: str, value: Document) -> AxisValue | None:
    """A value on the axis of one key, named after itself; None if it needs a given name."""
    name = name_of(value.value)
    if name is None:
        return None
    reads_back = read_value(name).value == value.value
    written = name if reads_back else _yaml_text(value.value)
    return AxisValue(name=name, written=written, sets={key: value})


def _yaml_text(value: JsonValue) -> str:
    """A value on one line, as YAML reads it back: JSON, except that 1e-05 is text to YAML."""
    if isinstance(value, float):
        return yaml.safe_dump(value).removesuffix("\n...\n")
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml_text, value))}]"
    return json.dumps(value)

"""From the values of a sweep file to a sweep, or to every problem of its form."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from scenarios.document import Document
from scenarios.errors import KeyPath, ScenarioError, did_you_mean, not_one_of, shown
from scenarios.schema import checked_name
from scenarios.sweep_schema import (
    Axis,
    AxisValue,
    Exclusion,
    Strategy,
    Sweep,
    is_value_name,
    name_of,
    value_of_key,
)
from scenarios.yaml_text import read_file

_KEYS: Final = ("sweep", "about", "base", "axes", "exclude", "strategy", "salt", "seeds")
_SEED: Final = "inputs.seed"
_NAMING: Final = "write `AXIS: {NAME: {key: value}}`, NAME of letters, digits, '.', '_' and '-'"


def holds_sweep(path: Path) -> bool:
    """Whether a file is a sweep and no scenario; ScenarioError if it cannot be read at all."""
    value = read_file(path).value
    return isinstance(value, dict) and "sweep" in value


def read_sweep(document: Document, path: Path) -> Sweep:
    """The sweep that a file holds; whether its rows are scenarios is found out elsewhere.

    Args:
        document: the values of the file.
        path: the file.

    Raises:
        ScenarioError: with every problem of its form.
    """
    reader = _Reader(document)
    reader.check_keys()
    axes = reader.axes()
    sweep = Sweep(
        path=path,
        name=reader.name(),
        about=reader.about(),
        base=reader.base(),
        axes=axes,
        exclusions=reader.exclusions(axes),
        strategy=reader.strategy(),
        salt=reader.salt(),
        seeds=reader.seeds(axes),
    )
    if document.problems:
        raise ScenarioError(str(path), document.problems)
    return sweep


class _Reader:
    """Reads one section a method; what is wrong goes to the document's problems."""

    def __init__(self, document: Document) -> None:
        assert isinstance(document.value, dict)
        self._document = document
        self._top = document.value

    def check_keys(self) -> None:
        for key in self._top:
            if key not in _KEYS:
                guess = did_you_mean(key, _KEYS) or f"; known: {', '.join(_KEYS)}"
                self._problem((key,), f"unknown key{guess}")

    def name(self) -> str:
        text = self._text(("sweep",), self._top.get("sweep"))
        try:
            return checked_name(text) if text else ""
        except ValueError as error:
            self._problem(("sweep",), str(error))
            return ""

    def about(self) -> str:
        return self._text(("about",), self._top["about"]) if "about" in self._top else ""

    def base(self) -> Document:
        if "name" in self._mapping(("base",), self._top.get("base"), "the keys of a scenario"):
            self._problem(("base", "name"), "a row is named after its values; leave it out")
        return self._document.part(("base",)) if "base" in self._top else Document()

    def axes(self) -> tuple[Axis, ...]:
        given = self._mapping(("axes",), self._top.get("axes"), "axes with their values")
        axes = tuple(self._axis(name, values) for name, values in given.items())
        if not axes and not self._document.problems:
            self._problem(("axes",), "has no axis; a single scenario is a file of its own")
        for first, second in combinations(axes, 2):
            self._keep_apart(first, second)
        return axes

    def exclusions(self, axes: tuple[Axis, ...]) -> tuple[Exclusion, ...]:
        given = self._top.get("exclude", [])
        if not isinstance(given, list):
            self._problem(("exclude",), f"{shown(given)} was read; must be a list")
            return ()
        names = {axis.name: [value.name for value in axis.values] for axis in axes}
        return tuple(self._exclusion(("exclude", at), row, names) for at, row in enumerate(given))

    def strategy(self) -> Strategy:
        given = self._top.get("strategy", Strategy.ALL)
        if given not in list(Strategy):
            self._problem(("strategy",), not_one_of(given, list(Strategy)))
            return Strategy.ALL
        return Strategy(str(given))

    def salt(self) -> int:
        given = self._top.get("salt", 0)
        if type(given) is not int:
            self._problem(("salt",), f"{shown(given)} was read; must be a whole number")
            return 0
        return given

    def seeds(self, axes: tuple[Axis, ...]) -> Axis | None:
        """An axis like any other, but that ``strategy`` leaves nothing of it out."""
        given = self._top.get("seeds")
        if given is None:
            return None
        path = ("seeds",)
        if not isinstance(given, list) or not given or any(type(one) is not int for one in given):
            self._problem(path, f"{shown(given)} was read; must be a list of whole numbers")
            return None
        if len(set(given)) < len(given):
            self._problem(path, "names a seed twice")
        for axis in axes:
            if any(
                _SEED in (key, axis.name) or key == "inputs" for v in axis.values for key in v.sets
            ):
                self._problem(path, f"axis {axis.name!r} sets {_SEED} as well")
        values = (
            value_of_key(_SEED, self._document.part(("seeds", at))) for at in range(len(given))
        )
        return Axis(name=_SEED, is_key=True, values=tuple(filter(None, values)))

    def _axis(self, name: str, given: JsonValue) -> Axis:
        path = ("axes", name)
        if isinstance(given, list):
            values = tuple(self._values_of_key(name, given))
        else:
            bundles = self._mapping(path, given, "a list of values, or names with what they set")
            values = tuple(self._bundle((*path, key), sets) for key, sets in bundles.items())
        if given in ([], {}):
            self._problem(path, "has no value")
        if any("name" in value.sets for value in values):
            self._problem(path, "sets name, but a row is named after its values")
        names = [value.name for value in values]
        for twice in sorted({label for label in names if names.count(label) > 1}):
            self._problem(path, f"two of its values are called {twice!r}")
        return Axis(name=name, is_key=isinstance(given, list), values=values)

    def _values_of_key(self, key: str, given: list[JsonValue]) -> Iterator[AxisValue]:
        for at, value in enumerate(given):
            path = ("axes", key, at)
            named = value_of_key(key, self._document.part(path))
            if named is None:
                self._problem(path, f"{shown(value)} makes no name of a row; {_NAMING}")
            else:
                yield named

    def _bundle(self, path: tuple[str, ...], given: JsonValue) -> AxisValue:
        if not is_value_name(path[-1]):
            self._problem(path, f"makes no name of a row; {_NAMING}")
        keys = self._mapping(path, given, "the keys that it sets")
        for key in keys:
            inside = [other for other in keys if other.startswith(f"{key}.")]
            if inside:
                self._problem((*path, inside[0]), f"lies in {key}, which this value sets as well")
        parts = {key: self._document.part((*path, key)) for key in keys}
        return AxisValue(name=path[-1], written=path[-1], sets=parts)

    def _keep_apart(self, first: Axis, second: Axis) -> None:
        """Two axes may not set the same key, nor one a section and the other a key in it."""
        for key in sorted({key for value in second.values for key in value.sets}):
            others = {other for value in first.values for other in value.sets}
            if any(f"{a}.".startswith(f"{b}.") for o in others for a, b in ((key, o), (o, key))):
                self._problem(("axes", second.name), f"sets {key}; so does axis {first.name!r}")

    def _exclusion(
        self, path: KeyPath, given: JsonValue, known: Mapping[str, list[str]]
    ) -> Exclusion:
        row = self._mapping(path, given, "axes with the values to leave out, and because")
        axes = {name: value for name, value in row.items() if name != "because"}
        if row and not axes:
            self._problem(path, "names no axis: it would leave every row out")
        return Exclusion(
            where={axis: self._excluded((*path, axis), axes[axis], known) for axis in axes},
            because=self._text((*path, "because"), row.get("because")) if row else "",
        )

    def _excluded(
        self, path: KeyPath, given: JsonValue, known: Mapping[str, list[str]]
    ) -> frozenset[str]:
        axis = str(path[-1])
        if axis not in known:
            self._problem(path, f"no such axis{did_you_mean(axis, known)}")
            return frozenset()
        names = [name_of(item) for item in (given if isinstance(given, list) else [given])]
        for name in names:
            if name not in known[axis]:
                self._problem(path, not_one_of(name, known[axis]))
        return frozenset(filter(None, names))

    def _text(self, path: KeyPath, given: JsonValue) -> str:
        if isinstance(given, str) and given:
            return given
        self._problem(path, f"{shown(given)} was read; must be text")
        return ""

    def _mapping(self, path: KeyPath, given: JsonValue, wanted: str) -> dict[str, JsonValue]:
        if isinstance(given, dict):
            return given
        self._problem(path, f"{shown(given)} was read; must be {wanted}")
        return {}

    def _problem(self, path: KeyPath, message: str) -> None:
        self._document.problems.append(self._document.problem(path, message))

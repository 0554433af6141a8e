"""A complete scenario as plain values, and changes to it that may or may not be legal."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from pydantic import JsonValue

from scenarios.document import Document
from scenarios.loader import LoadedScenario
from scenarios.resolve import own_names

Values = Mapping[str, Any]
"""A whole scenario in JSON's types, every default filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step to a smaller or simpler scenario.

    what  the step in words, with the value before and after
    sets  dotted key -> its new value
    """

    what: str
    sets: Mapping[str, JsonValue]

    def applied_to(self, values: Values) -> dict[str, Any]:
        """A copy with the new values in it; whether they are legal is for the loader to say."""
        document = Document(value=deepcopy(dict(values)))
        for key, value in self.sets.items():
            document.put(tuple(key.split(".")), Document(value=value))
        return cast("dict[str, Any]", document.value)


Ladder = tuple[Change, ...]
"""Changes of one thing, the largest step first."""


LaddersOf = Callable[[LoadedScenario], Iterator[Ladder]]
"""The ladders of one kind that lead away from a scenario."""


def values_of(loaded: LoadedScenario) -> dict[str, Any]:
    """The scenario's values; its model's overrides by the names that ``Change`` uses, our own."""
    values = loaded.scenario.model_dump(mode="json")
    values["model"]["overrides"] = own_names(loaded.scenario.model)
    return values


def valued(values: Values, key: str) -> Any:  # noqa: ANN401  whatever a scenario holds
    """What stands at a dotted key."""
    found: Any = values
    for part in key.split("."):
        found = found[part]
    return found


def together(changes: Ladder) -> Change:
    """All of them as one."""
    sets = {key: value for change in changes for key, value in change.sets.items()}
    return Change(what="; ".join(change.what for change in changes), sets=sets)

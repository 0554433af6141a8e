"""From plain values to a Scenario, or to every reason why not."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from scenarios.aliases import meant_switch, meant_values
from scenarios.document import Document
from scenarios.errors import KeyPath, Problem, asked_back, did_you_mean, not_one_of, shown
from scenarios.schema import Scenario, Spec
from scenarios.scope import left_out

_JSON_KINDS: Final = {bool: "true or false", int: "a number", float: "a number", str: "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """A scenario with the sections that are right.

    scenario  complete if ``problems`` is empty; else read nothing of it but ``sections``
    sections  names of the top-level keys that validated
    """

    scenario: Scenario
    sections: frozenset[str]
    problems: tuple[Problem, ...]


def validate(document: Document) -> Validated:
    """Check a document against the schema; right sections survive wrong neighbours."""
    try:
        scenario = Scenario.model_validate_json(json.dumps(document.value))
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = tuple(_problem(detail, document) for detail in details)
        return _partial(document.value, _wrong_sections(details), problems)
    return Validated(scenario=scenario, sections=frozenset(Scenario.model_fields), problems=())


def _wrong_sections(details: list[ErrorDetails]) -> set[str]:
    """Top-level keys with an error; all of them if the whole is at fault."""
    wrong = {str(detail["loc"][0]) if detail["loc"] else "" for detail in details}
    return set(Scenario.model_fields) if "" in wrong else wrong


def _partial(raw: JsonValue, wrong: set[str], problems: tuple[Problem, ...]) -> Validated:
    given = raw if isinstance(raw, dict) else {}
    right = [name for name in Scenario.model_fields if name not in wrong]
    values: dict[str, Any] = {
        name: _read_alone(name, given[name]) for name in right if name in given
    }
    scenario = Scenario.model_construct(**values)
    return Validated(scenario=scenario, sections=frozenset(right), problems=problems)


def _read_alone(section: str, value: JsonValue) -> object:
    """A section that validated as part of the whole, by itself."""
    annotation: Any = Scenario.model_fields[section].annotation
    read: object = TypeAdapter(annotation).validate_json(json.dumps(value))
    return read


def _problem(error: ErrorDetails, document: Document) -> Problem:
    path: KeyPath = error["loc"]
    return document.problem(path, _message(error, is_read=path in document.hints))


def _message(error: ErrorDetails, *, is_read: bool) -> str:
    """What is allowed; also what was read, unless a hint says it already."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(error["loc"])
    if kind == "missing":
        return "is required"
    if kind == "json_invalid":  # the one thing YAML can escape and JSON cannot hold
        return "some text in it is no Unicode: a lone surrogate"
    if kind in ("enum", "literal_error"):
        return _not_allowed(error["loc"], value, _options(context["expected"]), is_read=is_read)
    if kind == "value_error":
        return str(context["error"])
    wanted = error["msg"].replace("Input should be", "must be", 1)
    return wanted if is_read else f"{shown(value)} was read{_kind(value)}; {wanted}"


def _unknown_key(path: KeyPath) -> str:
    reason = left_out(path[-1])
    if reason is not None:
        return f"unknown key: {reason}"
    switch = meant_switch(path[-1])
    if switch is not None:
        return f"unknown key{asked_back([switch])}"
    known = _keys_at(path[:-1])
    guess = did_you_mean(path[-1], known)
    return f"unknown key{guess or '; known: ' + ', '.join(known)}"


def _not_allowed(path: KeyPath, value: object, options: Sequence[str], *, is_read: bool) -> str:
    reason, allowed = left_out(value), f"allowed: {', '.join(options)}"
    if reason is not None:
        return f"{reason}; {allowed}"
    return allowed if is_read else not_one_of(value, options, meant_values(path, value, options))


def _options(expected: str) -> list[str]:
    """``'auto', True or False`` as words, truth values as YAML writes them."""
    words = re.split(r", | or ", expected)
    return [word.lower() if word in ("True", "False") else word.strip("'") for word in words]


def _keys_at(path: Sequence[str | int]) -> list[str]:
    section: Any = Scenario
    for key in path:
        section = section.model_fields[key].annotation
    assert issubclass(section, Spec)
    return list(section.model_fields)


def _kind(value: object) -> str:
    name = _JSON_KINDS.get(type(value))
    return f" ({name})" if name else ""

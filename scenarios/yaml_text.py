"""YAML text to a document: plain values, the line of each key, what YAML reads unexpectedly."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Final

import yaml
from pydantic import JsonValue

from scenarios.document import Document
from scenarios.errors import KeyPath, Problem, ScenarioError, dotted

# A scenario is a page; aliases can make a page mean billions of values.
_MAX_VALUES: Final = 20_000
_MAX_DEPTH: Final = 32
_MAX_BYTES: Final = 1_000_000

_OCTAL: Final = re.compile(r"[-+]?0[0-7_]+")
_EXPONENT: Final = re.compile(r"([-+]?[0-9][0-9_]*(?:\.[0-9_]*)?)[eE]([-+]?)([0-9]+)")
_LEADING_ZERO: Final = re.compile(r"[-+]?0[0-9_]+")
_TAG: Final = "tag:yaml.org,2002:"
_KINDS: Final = ("map", "seq", "null", "str", "timestamp", "bool", "int", "float")


def read_file(path: Path) -> Document:
    """Read one YAML file whose top level is a mapping.

    Raises:
        ScenarioError: no such file, no regular file, not UTF-8, not YAML, no mapping.
    """
    document = read_value(_text(path))
    if not isinstance(document.value, dict):
        found = "it is empty" if document.value is None else "its top level is no mapping"
        fatal = document.problems or [Problem("", f"{found}; a scenario is `key: value` lines")]
        raise ScenarioError(str(path), fatal)
    return document


def read_value(text: str) -> Document:
    """Read any YAML text; what is wrong with it is in ``problems``."""
    reader = _Reader()
    try:
        node = _composed(text)
        if node is not None:
            reader.document.value = reader.read(node, ())
    except yaml.MarkedYAMLError as error:
        reader.document.problems.append(_syntax_problem(error))
    except yaml.YAMLError as error:
        reader.document.problems.append(Problem("", f"is not YAML: {error}".replace("\n", " ")))
    except RecursionError:
        reader.document.problems.append(Problem("", "is nested too deeply"))
    return reader.document


@lru_cache(maxsize=256)
def _composed(text: str) -> yaml.Node | None:
    """Nodes that are only read: rows of a sweep have the file and most of their values in common.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _text(path: Path) -> str:
    if not path.exists():
        raise ScenarioError(str(path), [Problem("", "no such file")])
    if not path.is_file():
        raise ScenarioError(str(path), [Problem("", "is no file that can be read as a scenario")])
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise ScenarioError(str(path), [Problem("", reason)]) from None
    if len(content) > _MAX_BYTES:
        message = f"has {len(content)} bytes; a scenario has at most {_MAX_BYTES}"
        raise ScenarioError(str(path), [Problem("", message)])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        message = f"is not UTF-8: byte 0x{content[error.start]:02x}"
        raise ScenarioError(str(path), [Problem("", message, line)]) from None


def _syntax_problem(error: yaml.MarkedYAMLError) -> Problem:
    line = error.problem_mark.line + 1 if error.problem_mark else None
    what = str(error.problem)
    if "'\\t'" in what:
        return Problem("", "a tab indents here; YAML indents with spaces", line)
    if "single document" in str(error.context):
        return Problem("", "a second document ('---') begins; a file holds one scenario", line)
    return Problem("", f"is not YAML: {what}", line)


class _Reader:
    """One pass over the composed nodes."""

    def __init__(self) -> None:
        self.document = Document()
        self._constructor = yaml.constructor.SafeConstructor()
        self._num_values = 0

    def read(self, node: yaml.Node, path: KeyPath) -> JsonValue:
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise yaml.YAMLError(f"more than {_MAX_VALUES} values, counting aliases")
        if len(path) > _MAX_DEPTH:
            raise yaml.YAMLError(f"nested more than {_MAX_DEPTH} deep, following aliases")
        if node.tag.removeprefix(_TAG) not in _KINDS:
            line = node.start_mark.line + 1
            self._problem(path, f"the tag {node.tag!r} is not read in a scenario", line)
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, (*path, i)) for i, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> JsonValue:
        result: dict[str, JsonValue] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if key_node.tag != f"{_TAG}str":
                written = key if isinstance(key, str) else "a list or mapping"
                self._problem(path, f"the key {written!r} is not text; quote it", line)
                continue
            here = (*path, key)
            if key in result:
                first = self.document.origins[here]
                self._problem(here, f"is given twice, first in line {first}", line)
                continue
            self.document.origins[here] = line
            result[key] = self.read(value_node, here)
        return result

    def _item(self, node: yaml.Node, path: KeyPath) -> JsonValue:
        self.document.origins[path] = node.start_mark.line + 1
        return self.read(node, path)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> JsonValue:
        match node.tag.removeprefix(_TAG):
            case "null":
                return None
            case "bool":
                return self._boolean(node, path)
            case "int" | "float" as kind:
                return self._number(node, path, kind)
        self._hint_number(node, path)
        return str(node.value)

    def _boolean(self, node: yaml.ScalarNode, path: KeyPath) -> bool:
        value = bool(self._constructor.construct_yaml_bool(node))
        if node.value.lower() not in ("true", "false"):
            reading = f"{node.value!r} is {str(value).lower()} in YAML"
            self.document.hints[path] = f"{reading}; quote it if text is meant"
        return value

    def _number(self, node: yaml.ScalarNode, path: KeyPath, kind: str) -> int | float | None:
        text, line = node.value, node.start_mark.line + 1
        try:
            if kind == "float":
                value: int | float = self._constructor.construct_yaml_float(node)
            else:
                value = int(self._constructor.construct_yaml_int(node))
        except ValueError:
            self._problem(path, f"{text[:20]!r}... is no number that can be held", line)
            return None
        if _OCTAL.fullmatch(text):
            decimal = int(text.replace("_", ""))
            reading = f"{text!r} is octal in YAML and means {value}"
            self._problem(path, f"{reading}; write {decimal}", line)
        elif ":" in text:
            self._problem(path, f"{text!r} is base 60 in YAML and means {value}; quote it", line)
        return value

    def _hint_number(self, node: yaml.ScalarNode, path: KeyPath) -> None:
        if node.style is not None:
            return
        if match := _EXPONENT.fullmatch(node.value):
            mantissa, sign, digits = match.groups()
            point = "" if "." in mantissa else ".0"
            wanted = f"{mantissa}{point}e{sign or '+'}{digits}"
            self.document.hints[path] = f"{node.value!r} was read as text (YAML wants {wanted})"
        elif _LEADING_ZERO.fullmatch(node.value):
            self.document.hints[path] = f"{node.value!r} was read as text (drop the leading zero)"

    def _problem(self, path: KeyPath, message: str, line: int) -> None:
        self.document.problems.append(Problem(dotted(path), message, line))

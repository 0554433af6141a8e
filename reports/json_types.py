"""Field types that JSON lacks or loses: non-finite floats, tuples, free-form objects."""

import math
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    JsonValue,
    PlainSerializer,
    WithJsonSchema,
)

RECORD: Final = ConfigDict(
    extra="forbid",
    frozen=True,
    strict=True,
    use_attribute_docstrings=True,
    json_schema_serialization_defaults_required=True,
)
"""Of every part of a result."""

NON_FINITE: Final = ("nan", "inf", "-inf")

T = TypeVar("T")


def _float_from_json(value: object) -> object:
    return float(value) if isinstance(value, str) and value in NON_FINITE else value


def _float_to_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _finite_json(value: JsonValue) -> JsonValue:
    if isinstance(value, float):
        return _float_to_json(value)
    if isinstance(value, dict):
        return {key: _finite_json(item) for key, item in value.items()}
    return [_finite_json(item) for item in value] if isinstance(value, list) else value


def _finite_object(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    return {key: _finite_json(item) for key, item in value.items()}


JsonFloat = Annotated[
    float,
    BeforeValidator(_float_from_json),
    PlainSerializer(_float_to_json, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}]}),
]
"""A float64 that survives JSON: NaN and the infinities are the strings "nan", "inf", "-inf"."""

Items = Annotated[Sequence[T], AfterValidator(tuple)]
"""Any sequence when given, a tuple when kept, an array in JSON."""

JsonObject = Annotated[dict[str, JsonValue], AfterValidator(_finite_object)]
"""A free-form object; non-finite floats in it become the strings of ``JsonFloat`` and stay so."""

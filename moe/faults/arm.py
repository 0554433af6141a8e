"""From a fault's name and parameters to something that acts on one rank."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar

import torch

from moe.faults.catalog import FAULTS
from moe.faults.kinds import Fault, Parameter, Params, Plan
from moe.faults.tampering import VERBS
from moe.formats import Stage

V = TypeVar("V")

_WORDS: Final[Mapping[str, Sequence[str]]] = MappingProxyType({"stage": tuple(Stage), "op": VERBS})
"""Parameter -> the words that it takes."""

_AT_LEAST_ONE: Final = ("tile", "vector", "bound")
"""Parameters that something is divided by: rows of a tile, columns of a vector, entries."""

_LARGEST: Final[Mapping[type, float]] = MappingProxyType(
    {int: 2**31 - 1, float: torch.finfo(torch.float32).max}
)
"""Kind of a number -> the largest finite one that a tensor can be compared with or clamped to."""


class UnknownFaultError(ValueError):
    """No fault of that name, or no parameter of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmedFault:
    """A fault with its parameters and ranks settled; a plain value that travels to any process."""

    name: str
    params: Params
    ranks: tuple[int, ...]

    @property
    def fault(self) -> Fault:
        """The catalogue's entry."""
        return FAULTS[self.name]

    @property
    def stage(self) -> Stage:
        """Where it acts; a parameter ``stage`` overrides the catalogue."""
        return Stage(str(self.params.get("stage", self.fault.stage)))

    def stage_in(self, plan: Plan) -> Stage:
        """Where it acts under the topology of a plan."""
        resolve = self.fault.stage_in
        return self.stage if resolve is None else resolve(plan, self.params)


def arm(name: str, params: Mapping[str, object], tokens: Sequence[int]) -> ArmedFault:
    """Fill in defaults and settle on which ranks the fault acts.

    Args:
        name: a key of ``FAULTS``.
        params: what the user gave.
        tokens: tokens of each rank, to find a busy one for ``rank: auto``.

    Raises:
        UnknownFaultError: unknown name or parameter, or a value that does not fit; the message
            says what there is.
    """
    fault = fault_named(name)
    settled = dict(fault.params)
    for key, value in params.items():
        default = _named(f"parameter of {name}", key, fault.params)
        settled[key] = _fitting(name, key, value, default)
    return ArmedFault(
        name=name, params=settled, ranks=_ranks(name, settled.get("rank", "all"), tokens)
    )


def fault_named(name: str) -> Fault:
    """The catalogue's entry of that name.

    Raises:
        UnknownFaultError: there is none; the message says what there is.
    """
    return _named("fault", name, FAULTS)


def _named(what: str, name: str, table: Mapping[str, V]) -> V:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownFaultError(f"no {what} {name!r}; known: {', '.join(sorted(table))}{hint}")


def _fitting(name: str, key: str, value: object, default: Parameter) -> Parameter:
    """``value`` as the parameter takes it: of its default's kind and size, or any for ``rank``."""
    if not isinstance(value, int | float | str):
        raise UnknownFaultError(f"{name}: {key}={value!r} is no single number, word or truth value")
    if key == "rank":
        return value
    if key in _WORDS and value not in _WORDS[key]:
        raise UnknownFaultError(f"{name}: {key}={value!r} is not one of {', '.join(_WORDS[key])}")
    is_whole_float = type(default) is float and type(value) is int
    if type(value) is not type(default) and not is_whole_float:
        kind = type(default).__name__
        raise UnknownFaultError(
            f"{name}: {key}={value!r} is no {kind} like its default {default!r}"
            f"{_spelling(value, default)}"
        )
    _check_size(name, key, value, default)
    return float(value) if is_whole_float else value


def _spelling(value: Parameter, default: Parameter) -> str:
    """How YAML writes what is a number elsewhere."""
    is_word = isinstance(default, float) and str(value).lower() in ("nan", "inf")
    return f"; YAML writes .{str(value).lower()}" if is_word else ""


def _check_size(name: str, key: str, value: Parameter, default: Parameter) -> None:
    if isinstance(value, str | bool):
        return
    if value < 0:
        raise UnknownFaultError(f"{name}: {key}={value!r} is negative")
    if value == 0 and key in _AT_LEAST_ONE:
        raise UnknownFaultError(f"{name}: {key}=0 is none: 1 is the least")
    largest = _LARGEST[type(default)]
    if largest < value < math.inf:
        raise UnknownFaultError(f"{name}: {key}={value!r} is more than {largest}")


def _ranks(name: str, rank: Parameter, tokens: Sequence[int]) -> tuple[int, ...]:
    if rank == "all":
        return tuple(range(len(tokens)))
    if rank == "idle":
        return tuple(r for r, count in enumerate(tokens) if not count)[:1]
    if rank == "auto":
        busy = [r for r, count in enumerate(tokens) if count] or [0]
        return (busy[min(1, len(busy) - 1)],)
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < len(tokens):
        return (rank,)
    raise UnknownFaultError(
        f"{name}: rank={rank!r} is not 'auto', 'idle', 'all' or a number under {len(tokens)}"
    )

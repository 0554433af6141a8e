"""What a fault is. No stage knows of them: they act on taps, collectives, plans or checkers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moe.formats import Stage

Parameter = int | float | str | bool


class FaultKind(StrEnum):
    """Where a fault takes hold."""

    VALUE = "value"
    COLLECTIVE = "collective"
    PLAN = "plan"
    CHECKER = "checker"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FaultContext:
    """What a fault may look at while it acts.

    rank      the rank it acts on
    num_ranks  ranks of the world
    params    its parameters, defaults filled in
    seen      what earlier stages of this rank handed on, in this forward
    acted     names of the faults that changed something on this rank
    """

    rank: int
    num_ranks: int
    params: Mapping[str, Parameter]
    seen: Mapping[Stage, Any] = field(default_factory=dict)
    acted: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fault:
    """One named way to be wrong.

    stage    where it acts, so where it has to be found
    origin   the public bug of this kind
    params   names and defaults; ``rank`` is "auto" (the second rank with tokens), "all" or a
             number; ``row`` and ``expert`` count, modulo how many there are, what the fault acts on
    act      VALUE: (stage value, context) -> stage value; COLLECTIVE: (collectives, context) ->
             collectives; PLAN: (plan, params) -> plan; CHECKER: params -> names of blinded checks
    needs_process  it kills or stops the process, so a rank needs one of its own
    """

    name: str
    kind: FaultKind
    stage: Stage
    about: str
    origin: str
    params: Mapping[str, Parameter]
    act: Callable[..., Any]
    needs_process: bool = False

"""What a fault is. No stage knows of them: they act from outside, on what a rank or judge gets."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from moe.formats import Stage
from moe.mistakes import Mistake

Parameter = int | float | str | bool
Params: TypeAlias = Mapping[str, Parameter]

Plan: TypeAlias = Any
"""What a rank is told. Its type belongs to those who compose ranks, and ``moe`` knows no such."""

Judged: TypeAlias = Any
"""What the golden model is told of the layer."""


class FaultKind(StrEnum):
    """Where a fault takes hold."""

    VALUE = "value"
    COLLECTIVE = "collective"
    PLAN = "plan"
    CHECKER = "checker"
    GOLDEN = "golden"

    @property
    def is_of_the_judge(self) -> bool:
        """Whether the ranks compute as they should, and what judges them is wrong."""
        return self in {FaultKind.CHECKER, FaultKind.GOLDEN}


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FaultContext:
    """What a fault may look at while it acts.

    rank      the rank it acts on
    num_ranks  ranks of the world
    num_slots  physical expert slots of all ranks
    params    its parameters, defaults filled in
    seen      what earlier stages of this rank handed on, in this forward
    earlier   what its stages handed on in the forward before; empty in the first
    changed   a collective fault calls it when it changes something; taps see that by themselves
    """

    rank: int
    num_ranks: int
    params: Params
    num_slots: int = 0
    seen: Mapping[Stage, Any] = field(default_factory=dict)
    earlier: Mapping[Stage, Any] = field(default_factory=dict)
    changed: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fault:
    """One named way to be wrong.

    stage    where it acts, so where it has to be found
    origin   the public bug of this kind; or ``sglang-0.5.21``, of what its source does; or our own
             reading of something; several are joined by ``; ``
    params   names and defaults; ``rank`` is "auto" (the second rank with tokens), "idle" (the
             first without), "all" or a number; ``row`` and ``expert`` count, modulo how many there
             are, what the fault acts on; ``op`` and ``occurrence`` name a collective
             (``moe.faults.collectives``); ``stage`` is another stage to act at, where the fault
             knows the values handed on there
    act      VALUE: (stage value, context) -> stage value; COLLECTIVE: (collectives, context) ->
             collectives; PLAN: (plan, params, rank) -> plan; CHECKER: params -> names of blinded
             checks; GOLDEN: (what the golden is told, params) -> the same, wrong. A fault that
             finds nothing to act on hands back what it was given.
    stage_in  (plan, params) -> where it acts under a topology; None: at ``stage`` under all
    mistakes  kinds of mistake that name it rightly; empty: none is known
    needs_process  it kills or stops the process, so a rank needs one of its own
    """

    name: str
    kind: FaultKind
    stage: Stage
    about: str
    origin: str
    params: Params
    act: Callable[..., Any]
    stage_in: Callable[[Plan, Params], Stage] | None = None
    mistakes: frozenset[Mistake] = frozenset()
    needs_process: bool = False


def value_fault(
    stage: Stage, act: Callable[..., Any], about: str, origin: str, /, **params: Parameter
) -> Fault:
    """A fault of one busy rank, unless ``params`` say otherwise, that is named as ``act`` is."""
    return Fault(
        name=act.__name__,
        kind=FaultKind.VALUE,
        stage=stage,
        about=about,
        origin=origin,
        params={"rank": "auto", **params},
        act=act,
    )


def plan_fault(
    stage: Stage,
    act: Callable[[Plan, Params, int], Plan],
    about: str,
    origin: str,
    stage_in: Callable[[Plan, Params], Stage] | None = None,
) -> Fault:
    """A fault of all ranks that is named as ``act`` is."""
    return Fault(
        name=act.__name__,
        kind=FaultKind.PLAN,
        stage=stage,
        about=about,
        origin=origin,
        params={"rank": "all"},
        act=act,
        stage_in=stage_in,
    )

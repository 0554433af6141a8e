"""From a fault's name and parameters to something that acts on one rank."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moe.faults.catalog import FAULTS
from moe.faults.kinds import Fault, FaultContext, FaultKind, Parameter
from moe.formats import Stage
from topology.collectives import Collectives

V = TypeVar("V")


class UnknownFaultError(ValueError):
    """No fault of that name, or no parameter of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmedFault:
    """A fault with its parameters and ranks settled; a plain value that travels to any process."""

    name: str
    params: Mapping[str, Parameter]
    ranks: tuple[int, ...]

    @property
    def fault(self) -> Fault:
        """The catalogue's entry."""
        return FAULTS[self.name]

    @property
    def stage(self) -> Stage:
        """Where it acts; a parameter ``stage`` overrides the catalogue."""
        return Stage(str(self.params.get("stage", self.fault.stage)))


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
    fault = _named("fault", name, FAULTS)
    settled = dict(fault.params)
    for key, value in params.items():
        default = _named(f"parameter of {name}", key, fault.params)
        settled[key] = _fitting(name, key, value, default)
    return ArmedFault(
        name=name, params=settled, ranks=_ranks(name, settled.get("rank", "all"), tokens)
    )


def _named(what: str, name: str, table: Mapping[str, V]) -> V:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownFaultError(f"no {what} {name!r}; known: {', '.join(sorted(table))}{hint}")


def _fitting(name: str, key: str, value: object, default: Parameter) -> Parameter:
    """``value`` if it is of the kind the parameter takes: its default's, or any for ``rank``."""
    if not isinstance(value, int | float | str):
        raise UnknownFaultError(f"{name}: {key}={value!r} is no single number, word or truth value")
    if key == "stage" and value not in list(Stage):
        raise UnknownFaultError(f"{name}: stage={value!r} is not one of {', '.join(Stage)}")
    if key != "rank" and type(value) is not type(default):
        raise UnknownFaultError(
            f"{name}: {key}={value!r} is no {type(default).__name__} like its default {default!r}"
        )
    if key != "rank" and isinstance(value, int | float) and value < 0:
        raise UnknownFaultError(f"{name}: {key}={value!r} is negative")
    return value


def _ranks(name: str, rank: Parameter, tokens: Sequence[int]) -> tuple[int, ...]:
    if rank == "all":
        return tuple(range(len(tokens)))
    if rank == "auto":
        busy = [r for r, count in enumerate(tokens) if count] or [0]
        return (busy[min(1, len(busy) - 1)],)
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < len(tokens):
        return (rank,)
    raise UnknownFaultError(
        f"{name}: rank={rank!r} is not 'auto', 'all' or a number under {len(tokens)}"
    )


class FaultTap:
    """The tap of a faulty rank: lets every armed value fault act at its stage.

    Args:
        rank: this rank.
        num_ranks: ranks of the world.
        faults: all armed faults; those of other ranks and kinds are ignored.
    """

    def __init__(self, rank: int, num_ranks: int, faults: Sequence[ArmedFault]) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self.acted: set[str] = set()
        self._seen: dict[Stage, Any] = {}
        self._faults = [
            armed for armed in faults if armed.fault.kind is FaultKind.VALUE and rank in armed.ranks
        ]

    def __call__(self, stage: Stage, value: V) -> V:
        """The value after every fault of this stage has acted."""
        for armed in self._faults:
            if armed.stage is stage:
                before = value
                value = armed.fault.act(before, self._context(armed))
                if value is not before:
                    self.acted.add(armed.name)
        self._seen[stage] = value
        return value

    def _context(self, armed: ArmedFault) -> FaultContext:
        return FaultContext(
            rank=self._rank, num_ranks=self._num_ranks, params=armed.params, seen=self._seen
        )


def wrap_collectives(
    collectives: Collectives, faults: Sequence[ArmedFault], acted: set[str]
) -> Collectives:
    """This rank's verbs with every armed collective fault around them.

    Args:
        collectives: the verbs themselves.
        faults: all armed faults.
        acted: takes the names of those that changed something.
    """
    for armed in faults:
        if armed.fault.kind is FaultKind.COLLECTIVE and collectives.rank in armed.ranks:
            context = FaultContext(
                rank=collectives.rank,
                num_ranks=collectives.world_size,
                params=armed.params,
                acted=acted,
            )
            collectives = armed.fault.act(collectives, context)
    return collectives


def edit_plan(plan: V, faults: Sequence[ArmedFault], rank: int) -> V:
    """The plan as a rank with armed plan faults reads it."""
    for armed in faults:
        if armed.fault.kind is FaultKind.PLAN and rank in armed.ranks:
            plan = armed.fault.act(plan, armed.params)
    return plan


def plan_edits(plan: object, faults: Sequence[ArmedFault], rank: int) -> frozenset[str]:
    """Names of the plan faults that change this rank's plan."""
    return frozenset(
        armed.name
        for armed in faults
        if armed.fault.kind is FaultKind.PLAN
        and rank in armed.ranks
        and edit_plan(plan, [armed], rank) != plan
    )


def blinded_checks(faults: Sequence[ArmedFault]) -> frozenset[str]:
    """Names of the checks that armed checker faults break."""
    return frozenset(
        name
        for armed in faults
        if armed.fault.kind is FaultKind.CHECKER
        for name in armed.fault.act(armed.params)
    )

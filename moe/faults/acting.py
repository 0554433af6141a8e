"""What lets armed faults act: on taps, collectives, plans and checks of one rank."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from moe.faults.arm import ArmedFault
from moe.faults.bits import same_values
from moe.faults.kinds import FaultContext, FaultKind
from moe.formats import Stage
from topology.collectives import Collectives

V = TypeVar("V")


class FaultTap:
    """The tap of a faulty rank: lets every armed value fault act at its stage.

    Args:
        rank: this rank.
        num_ranks: ranks of the world.
        faults: all armed faults; those of other ranks and kinds are ignored.
        num_slots: physical expert slots of all ranks.
    """

    def __init__(
        self, rank: int, num_ranks: int, faults: Sequence[ArmedFault], num_slots: int = 0
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_slots = num_slots
        self.acted: set[str] = set()
        self._seen: dict[Stage, Any] = {}
        self._earlier: dict[Stage, Any] = {}
        self._faults = [
            armed for armed in faults if armed.fault.kind is FaultKind.VALUE and rank in armed.ranks
        ]

    def __call__(self, stage: Stage, value: V) -> V:
        """The value after every fault of this stage has acted."""
        if stage is Stage.GLUE_IN:
            self._begin()
        for armed in self._faults:
            if armed.stage is stage:
                before = value
                value = armed.fault.act(before, self._context(armed))
                if not same_values(before, value):
                    self.acted.add(armed.name)
        if self._faults:  # nobody else looks back at two forwards of stages
            self._seen[stage] = value
        return value

    def _begin(self) -> None:
        """A forward begins; weights are handed on in the first one only."""
        self._earlier, self._seen = self._seen, {}
        if Stage.WEIGHTS in self._earlier:
            self._seen[Stage.WEIGHTS] = self._earlier.pop(Stage.WEIGHTS)

    def _context(self, armed: ArmedFault) -> FaultContext:
        return FaultContext(
            rank=self._rank,
            num_ranks=self._num_ranks,
            num_slots=self._num_slots,
            params=armed.params,
            seen=self._seen,
            earlier=self._earlier,
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
                changed=partial(acted.add, armed.name),
            )
            collectives = armed.fault.act(collectives, context)
    return collectives


def edit_plan(plan: V, faults: Sequence[ArmedFault], rank: int) -> V:
    """The plan as a rank with armed plan faults reads it."""
    for armed in faults:
        if armed.fault.kind is FaultKind.PLAN and rank in armed.ranks:
            plan = armed.fault.act(plan, armed.params, rank)
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


def edit_golden(judged: V, faults: Sequence[ArmedFault]) -> V:
    """What the golden model is told, after armed faults of the golden itself."""
    for armed in faults:
        if armed.fault.kind is FaultKind.GOLDEN:
            judged = armed.fault.act(judged, armed.params)
    return judged

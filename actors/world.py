"""What runs the ranks of one plan, whichever way: in this process, or as Ray actors."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from actors.build import rank_weights
from actors.plan import LayerPlan
from actors.rank_program import RankProgram, RankReport
from moe.batch import LayerInput
from moe.faults import ArmedFault
from moe.formats import Stage
from moe.weights import LayerWeights
from topology.collectives import DeadlockError, Waiting, listed_ranks
from topology.loopback import LoopbackWorld, RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Where a rank ran and how it ended.

    state  ok, raised, died, hung, released (another rank failed first), not_started
    stage  the stage it was in when the world ended; None when it was through
    cause  what went wrong, for raised, died and hung
    """

    rank: int
    node: str
    pid: int | None
    device: str
    state: str
    stage: str | None = None
    cause: str | None = None


class WorldFailedError(RuntimeError):
    """A forward did not come back from every rank.

    Args:
        summary: one sentence: which rank, stage, node and cause.
        ranks: the state of every rank.
    """

    def __init__(self, summary: str, ranks: Sequence[RankStatus]) -> None:
        super().__init__(summary, ranks)
        self.summary = summary
        self.ranks = tuple(ranks)

    def __str__(self) -> str:
        return self.summary


class World(Protocol):
    """Living ranks with their weights loaded; the second forward is cheaper than the first."""

    def use(self, plan: LayerPlan) -> None:
        """Let the next forwards compute another layer over the same ranks.

        A layer that was in use before comes back with its weights loaded and its buffers as they
        were, also if its rows are dealt out otherwise now.

        Args:
            plan: of the same ranks and groups.

        Raises:
            WorldFailedError: a rank raised, died or hung.
        """
        ...

    def forward(self, given: Sequence[LayerInput], timeout_s: float) -> list[RankReport]:
        """One forward on every rank.

        Args:
            given: what each rank is handed.
            timeout_s: seconds after which a rank that is not back counts as hung.

        Raises:
            WorldFailedError: a rank raised, died or hung. The world is unusable afterwards.
        """
        ...

    def ranks(self) -> list[RankStatus]:
        """Where each rank lives."""
        ...

    def close(self) -> None:
        """Release every rank and leave nothing running."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class LoopbackRanks:
    """All ranks in this process, one running at a time; see ``World``.

    A rank that spins forever cannot be stopped here, so ``timeout_s`` has nothing to do: a
    deadlock is known at once.

    Args:
        plan: of the first layer.
        faults: what is injected.
        prepare: makes what a rank holds under a plan.
    """

    def __init__(
        self,
        plan: LayerPlan,
        faults: Sequence[ArmedFault] = (),
        prepare: Callable[[LayerPlan, int], LayerWeights] = rank_weights,
    ) -> None:
        self._world = LoopbackWorld(plan.layout.world_size)
        self._faults = tuple(faults)
        self._prepare = prepare
        self._layers: dict[int, list[RankProgram]] = {}
        self._plan = plan
        self.use(plan)

    def use(self, plan: LayerPlan) -> None:
        """See ``World``."""
        key = plan.layer_fingerprint()
        if key not in self._layers:
            self._layers[key] = [
                RankProgram(rank, plan, self._faults, prepare=self._prepare)
                for rank in plan.layout.world
            ]
        elif plan != self._plan:
            for program in self._layers[key]:
                program.deal_by(plan)
        self._plan, self._programs = plan, self._layers[key]

    def forward(self, given: Sequence[LayerInput], timeout_s: float) -> list[RankReport]:
        """See ``World``."""
        try:
            return self._world.run(
                lambda verbs: self._programs[verbs.rank].forward(given[verbs.rank], verbs)
            )
        except RankError as error:
            raise self._rank_failed(error) from error.cause
        except DeadlockError as error:
            raise self._deadlocked(error) from error

    def ranks(self) -> list[RankStatus]:
        """See ``World``."""
        return [
            RankStatus(
                rank=program.rank,
                node=socket.gethostname(),
                pid=os.getpid(),
                device=self._plan.device,
                state="ok",
            )
            for program in self._programs
        ]

    def close(self) -> None:
        """See ``World``; ranks end with each forward."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _rank_failed(self, error: RankError) -> WorldFailedError:
        stage = self._programs[error.rank].stage
        cause = f"{type(error.cause).__name__}: {error.cause}"
        ranks = [
            replace(status, state="raised", stage=stage, cause=cause)
            if status.rank == error.rank
            else replace(status, state="released", stage=self._programs[status.rank].stage)
            for status in self.ranks()
        ]
        here = ranks[error.rank]
        return WorldFailedError(
            f"rank {here.rank} raised in stage {stage} on {here.node}: {cause}", ranks
        )

    def _deadlocked(self, error: DeadlockError) -> WorldFailedError:
        """Blame ranks that left, or went on, without a collective; where none did, all that wait.

        A rank that skips a collective may wait in a later stage by now, but the first stage where
        somebody waits in vain lacks it.
        """
        waiting = {rank for where in error.waiting for rank in where.present}
        absent = {rank for where in error.waiting for rank in where.missing} - waiting
        first = min(error.waiting, key=lambda where: self._stage_of(where).position)
        stage = self._stage_of(first)
        ahead = {r for r in first.missing if self._programs[r].stage.position > stage.position}
        guilty = absent or ahead or waiting
        ranks = [
            replace(
                status,
                state="hung" if status.rank in guilty else "released",
                stage=self._programs[status.rank].stage
                if status.rank in waiting - ahead
                else stage,
                cause=str(error) if status.rank in guilty else None,
            )
            for status in self.ranks()
        ]
        stages = sorted({self._programs[rank].stage for rank in waiting})
        left = f"{listed_ranks(tuple(absent))} left without taking part; " if absent else ""
        if ahead and not absent:
            stages, left = [stage], f"{listed_ranks(tuple(ahead))} went on without taking part; "
        return WorldFailedError(f"deadlock in stage {', '.join(stages)}: {left}{error}", ranks)

    def _stage_of(self, where: Waiting) -> Stage:
        """The stage in which ranks wait; they make one call of it, so all are in it."""
        return self._programs[where.present[0]].stage

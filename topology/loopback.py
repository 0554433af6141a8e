"""A world in one thread: ranks are coroutines, and a collective is the only switch between them.

Deterministic by construction, and a deadlock is known at once: no rank is ready and some wait.
Greenlets rather than threads: a torch call in a thread of its own costs several times as much
(another memory arena, another OpenMP team).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from topology.collectives import (
    CollectiveMismatchError,
    Collectives,
    DeadlockError,
    Waiting,
    WorldAbortedError,
    expect_rows,
    ordered_sum,
    place_in_group,
)
from topology.mesh import Group

T = TypeVar("T")

_REDUCING: Final = frozenset({"all_reduce", "reduce_scatter_v"})
"""Verbs whose members all announce the same counts and get the same sum, or a chunk of it."""


@dataclass(slots=True)
class _Meeting:
    """One collective of one group: who came, with what; a reducing one has the sum at the end."""

    op: str
    group: Group
    sequence: int
    payloads: dict[int, tuple[Tensor, Sequence[int]]] = field(default_factory=dict)
    total: Tensor | None = None

    @property
    def complete(self) -> bool:
        return len(self.payloads) == len(self.group)

    def join(self, rank: int, rows: Tensor, counts: Sequence[int]) -> None:
        """Take a rank's part; the last one to come adds the parts of a reducing verb.

        A part is copied, as a rank may reuse its buffer before the last member has read it. A
        summand is not: it has been read before the first member goes on.
        """
        reduces = self.op in _REDUCING
        self.payloads[rank] = (rows if reduces else rows.clone(), counts)
        if reduces and self.complete:
            self.total = ordered_sum([self.payloads[member][0] for member in self.group])

    def waiting(self) -> Waiting:
        """Who is here and who is not."""
        return Waiting(
            op=self.op,
            sequence=self.sequence,
            present=tuple(rank for rank in self.group if rank in self.payloads),
            missing=tuple(rank for rank in self.group if rank not in self.payloads),
        )

    def __str__(self) -> str:
        return f"{self.op} #{self.sequence} of group {list(self.group)}"


class RankError(Exception):
    """A rank of a loopback world raised; ``__cause__`` is what it raised."""

    def __init__(self, rank: int, cause: BaseException) -> None:
        super().__init__(rank, cause)
        self.rank = rank
        self.cause = cause
        self.__cause__ = cause

    def __str__(self) -> str:
        return f"rank {self.rank} raised {type(self.cause).__name__}: {self.cause}"


class LoopbackWorld:
    """Runs one program on every rank of a world, in this process.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def run(self, program: Callable[[Collectives], T]) -> list[T]:
        """Run ``program`` once a rank and return the results in rank order.

        Raises:
            RankError: a rank raised; the others were released.
            DeadlockError: every rank that is left waits for another.
        """
        session = _Session(self.world_size)
        return session.run(program)


class _Session:
    """The state of one run: who can go on, who waits in which meeting."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._scheduler = getcurrent()
        self._ranks: list[greenlet] = []
        self._ready = set(range(world_size))
        self._waiting: dict[int, _Meeting] = {}
        self._meetings: dict[tuple[Group, int], _Meeting] = {}
        self._sequence: dict[tuple[int, Group], int] = {}
        self._failure: Exception | None = None

    def run(self, program: Callable[[Collectives], T]) -> list[T]:
        results: dict[int, T] = {}
        self._ranks = [
            greenlet(partial(self._rank_main, rank, program, results))
            for rank in range(self._world_size)
        ]
        rank = -1
        while self._ready and self._failure is None:
            rank = min(self._ready, key=lambda other: (other - rank - 1) % self._world_size)
            self._ranks[rank].switch()
        if self._failure is None and self._waiting:
            self._failure = DeadlockError([m.waiting() for m in self._meetings.values()])
        if self._failure is not None:
            self._release()
            raise self._failure
        return [results[rank] for rank in range(self._world_size)]

    def _rank_main(
        self, rank: int, program: Callable[[Collectives], T], results: dict[int, T]
    ) -> None:
        try:
            results[rank] = program(LoopbackCollectives(rank, self._world_size, self))
        except WorldAbortedError:
            pass
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  whatever a rank raises ends the world
            self._failure = self._failure or RankError(rank, error)
        finally:
            self._ready.discard(rank)

    def _release(self) -> None:
        """Let every rank that started leave the collective it waits in."""
        for rank, suspended in enumerate(self._ranks):
            if suspended and not suspended.dead:
                suspended.throw(WorldAbortedError(f"rank {rank} was released"))

    def meet(
        self, rank: int, op: str, group: Group, rows: Tensor, counts: Sequence[int]
    ) -> _Meeting:
        """Give this rank's part of a collective and wait for the others' parts."""
        if self._failure is not None:
            raise WorldAbortedError(f"rank {rank} calls {op} in a world that has failed")
        sequence = self._sequence.get((rank, group), 0)
        self._sequence[rank, group] = sequence + 1
        meeting = self._meetings.setdefault((group, sequence), _Meeting(op, group, sequence))
        _check_fits(rank, op, rows, counts, meeting)
        meeting.join(rank, rows, counts)
        if meeting.complete:
            del self._meetings[group, sequence]
            self._ready.update(group)
            for member in group:
                self._waiting.pop(member, None)
            return meeting
        self._waiting[rank] = meeting
        self._ready.discard(rank)
        self._scheduler.switch()
        return meeting


def _check_fits(rank: int, op: str, rows: Tensor, counts: Sequence[int], meeting: _Meeting) -> None:
    """Compare a part with the first that came; every other one has been compared with it."""
    if op != meeting.op:
        others = sorted(meeting.payloads)
        raise CollectiveMismatchError(f"rank {rank} calls {op} where ranks {others} call {meeting}")
    for other, (theirs, their_counts) in islice(meeting.payloads.items(), 1):
        if theirs.dtype != rows.dtype or theirs.shape[1:] != rows.shape[1:]:
            raise CollectiveMismatchError(
                f"{meeting}: rank {rank} sends {rows.dtype} rows of {tuple(rows.shape[1:])}, "
                f"rank {other} {theirs.dtype} rows of {tuple(theirs.shape[1:])}"
            )
        if op in _REDUCING and list(their_counts) != list(counts):
            raise CollectiveMismatchError(
                f"{meeting}: rank {rank} adds {list(counts)} rows, "
                f"rank {other} {list(their_counts)}"
            )


class LoopbackCollectives:
    """One rank's view of a loopback world; see ``Collectives``."""

    def __init__(self, rank: int, world_size: int, session: _Session) -> None:
        self.rank = rank
        self.world_size = world_size
        self._session = session

    def all_gather_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``."""
        here = place_in_group("all_gather_v", self.rank, group)
        expect_rows("all_gather_v", rows, counts[here])
        payloads = self._session.meet(self.rank, "all_gather_v", group, rows, counts).payloads
        for member, count in zip(group, counts, strict=True):
            expect_rows(f"all_gather_v from rank {member}", payloads[member][0], count)
        return torch.cat([payloads[member][0] for member in group])

    def all_to_all_v(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """See ``Collectives``."""
        here = place_in_group("all_to_all_v", self.rank, group)
        expect_rows("all_to_all_v", rows, sum(send_counts))
        payloads = self._session.meet(self.rank, "all_to_all_v", group, rows, send_counts).payloads
        received = []
        for member, expected in zip(group, recv_counts, strict=True):
            theirs, counts = payloads[member]
            start = sum(counts[:here])
            part = theirs[start : start + counts[here]]
            expect_rows(f"all_to_all_v from rank {member}", part, expected)
            received.append(part)
        return torch.cat(received)

    def all_reduce(self, rows: Tensor, group: Group) -> Tensor:
        """See ``Collectives``."""
        place_in_group("all_reduce", self.rank, group)
        return self._total("all_reduce", rows, [rows.shape[0]], group).clone()

    def reduce_scatter_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``."""
        here = place_in_group("reduce_scatter_v", self.rank, group)
        expect_rows("reduce_scatter_v", rows, sum(counts))
        total = self._total("reduce_scatter_v", rows, counts, group)
        return total.narrow(0, sum(counts[:here]), counts[here]).clone()

    def _total(self, op: str, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        total = self._session.meet(self.rank, op, group, rows, counts).total
        assert total is not None  # a meeting ends with the sum, or with an error
        return total

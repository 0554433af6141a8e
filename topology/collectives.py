"""The verbs ranks exchange data with; loopback and torch.distributed both speak them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from topology.mesh import Group


class CollectiveMismatchError(RuntimeError):
    """Members of a group do not agree on operation, sizes or dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A collective that cannot finish.

    op        the verb
    sequence  how many collectives of the group came before it
    present   ranks that wait in it
    missing   ranks of the group that did not come
    """

    op: str
    sequence: int
    present: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        present, missing = listed_ranks(self.present), listed_ranks(self.missing)
        verb = "wait" if len(self.present) > 1 else "waits"
        return f"{present} {verb} in {self.op} #{self.sequence} for {missing}"


def listed_ranks(ranks: Sequence[int]) -> str:
    """``rank 2`` or ``ranks 0, 1, 3-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(texts)}"


class DeadlockError(RuntimeError):
    """No rank can go on; ``waiting`` says who waits where for whom."""

    def __init__(self, waiting: Sequence[Waiting]) -> None:
        super().__init__("; ".join(map(str, waiting)))
        self.waiting = tuple(waiting)


class WorldAbortedError(RuntimeError):
    """Another rank failed; this one was released from a collective."""


class Collectives(Protocol):
    """What one rank sees of its world.

    Every member of ``group`` calls the same verbs in the same order; a rank without rows calls
    them too. Row tensors may be of any dtype and of any trailing shape, equal on all members.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        ...

    def all_gather_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """Rows of every member, in group order.

        Args:
            rows: [counts[i], ...], i = this rank's place in the group.
            counts: rows of each member.
            group: who takes part.

        Returns:
            [sum(counts), ...]

        Raises:
            CollectiveMismatchError: sizes do not fit together.
        """
        ...

    def all_to_all_v(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """Send a run of rows to every member and receive one from each, in group order.

        Args:
            rows: [sum(send_counts), ...], the run for member 0 first.
            send_counts: rows for each member.
            recv_counts: rows expected from each member.
            group: who takes part.

        Returns:
            [sum(recv_counts), ...]

        Raises:
            CollectiveMismatchError: sizes do not fit together.
        """
        ...

    def all_reduce(self, rows: Tensor, group: Group) -> Tensor:
        """Sum of the members' rows, as ``ordered_sum`` adds them.

        Args:
            rows: [N, ...], the same shape on every member.
            group: who takes part.

        Returns:
            [N, ...], equal bits on every member.

        Raises:
            CollectiveMismatchError: shapes differ.
        """
        ...

    def reduce_scatter_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """This rank's chunk of the sum of the members' rows, as ``ordered_sum`` adds them.

        Args:
            rows: [sum(counts), ...], the same shape on every member.
            counts: rows of each member's chunk, in group order.
            group: who takes part.

        Returns:
            [counts[i], ...], i = this rank's place in the group.

        Raises:
            CollectiveMismatchError: sizes do not fit together.
        """
        ...


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of equal shapes, first to last: fp32 inside and one rounding; integers exactly.

    The arithmetic that the reducing verbs declare; float64 is added as it is.
    """
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def place_in_group(what: str, rank: int, group: Group) -> int:
    """Position of ``rank`` in ``group``; raise ``ValueError`` when it is no member."""
    if rank not in group:
        raise ValueError(f"rank {rank} calls {what} on group {list(group)} without it")
    return group.index(rank)


def expect_rows(what: str, rows: Tensor, expected: int) -> None:
    """Raise ``CollectiveMismatchError`` unless ``rows`` has ``expected`` rows."""
    if rows.shape[0] != expected:
        raise CollectiveMismatchError(
            f"{what}: {rows.shape[0]} rows where {expected} were announced"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One collective as one rank made it; equal order and group are owed by all members."""

    stage: str
    op: str
    group: Group
    payload_bytes: int


class ForwardingCollectives:
    """Hands every call on to ``inner``; a subclass watches calls, or answers a verb itself."""

    def __init__(self, inner: Collectives) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self._inner.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        return self._inner.world_size

    def all_gather_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``."""
        with self.watching("all_gather_v", rows, group):
            return self._inner.all_gather_v(rows, counts, group)

    def all_to_all_v(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """See ``Collectives``."""
        with self.watching("all_to_all_v", rows, group):
            return self._inner.all_to_all_v(rows, send_counts, recv_counts, group)

    def all_reduce(self, rows: Tensor, group: Group) -> Tensor:
        """See ``Collectives``."""
        with self.watching("all_reduce", rows, group):
            return self._inner.all_reduce(rows, group)

    def reduce_scatter_v(self, rows: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        """See ``Collectives``."""
        with self.watching("reduce_scatter_v", rows, group):
            return self._inner.reduce_scatter_v(rows, counts, group)

    def watching(self, op: str, rows: Tensor, group: Group) -> AbstractContextManager[None]:
        """Around every call that is handed on."""
        return nullcontext()


class RecordingCollectives(ForwardingCollectives):
    """Keeps what was called: the traffic account and the progress line.

    Args:
        inner: does the work.
        entered: told each operation before it starts, answers with the stage it belongs to.
    """

    def __init__(self, inner: Collectives, entered: Callable[[str], str]) -> None:
        super().__init__(inner)
        self.calls: list[CollectiveCall] = []
        self._entered = entered

    def watching(self, op: str, rows: Tensor, group: Group) -> AbstractContextManager[None]:
        """Write the call down before it starts."""
        self.calls.append(
            CollectiveCall(stage=self._entered(op), op=op, group=group, payload_bytes=rows.nbytes)
        )
        return nullcontext()

"""Faults that sit between a rank and its collectives."""

from collections.abc import Sequence

from torch import Tensor

from moe.faults.kinds import FaultContext
from topology.collectives import Collectives, ForwardingCollectives
from topology.mesh import Group

DISPATCH_COUNTS, DISPATCH_ROWS, COMBINE_ROWS = range(3)
"""All-to-all calls of one forward, in order."""


class TamperedAllToAll(ForwardingCollectives):
    """Hands collectives on, but a subclass answers one all-to-all of a forward in its own way."""

    def __init__(self, inner: Collectives, context: FaultContext, which: int) -> None:
        super().__init__(inner)
        self._context = context
        self._which = which
        self._calls = 0

    def all_to_all_v(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """See ``Collectives``; one call of a forward is tampered with."""
        call, self._calls = self._calls, self._calls + 1
        exchange = self.tampered if call == self._which else self._inner.all_to_all_v
        return exchange(rows, send_counts, recv_counts, group)

    def tampered(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """What the rank gets from that call instead."""
        return self._inner.all_to_all_v(rows, send_counts, recv_counts, group)


class PartialDropped(TamperedAllToAll):
    """One of the partial rows that come back to the rank is zero."""

    def tampered(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """The rows that came, one of them zeroed."""
        received = self._inner.all_to_all_v(rows, send_counts, recv_counts, group)
        if received.shape[0] == 0:
            return received
        received[int(self._context.params["row"]) % received.shape[0]] = 0
        self._context.acted.add("partial_dropped")
        return received


class SkippedCombine(TamperedAllToAll):
    """The rank leaves before the collective, as an idle rank that returns early."""

    def tampered(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group
    ) -> Tensor:
        """Zeros, without the others."""
        self._context.acted.add("combine_skipped")
        return rows.new_zeros((sum(recv_counts), *rows.shape[1:]))


def partial_dropped(collectives: Collectives, context: FaultContext) -> Collectives:
    """Another rank's partial of one of this rank's tokens is lost on the way back."""
    return PartialDropped(collectives, context, COMBINE_ROWS)


def combine_skipped(collectives: Collectives, context: FaultContext) -> Collectives:
    """The rank does not take part in the combine; its peers wait."""
    return SkippedCombine(collectives, context, COMBINE_ROWS)

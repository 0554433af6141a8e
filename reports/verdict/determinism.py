"""Whether the same tokens give the same bits again, and the first stage where they do not.

Two questions of one topology: does a list that comes again repeat itself, and does what else is in
the batch, or on the rank, change a token? ``topology_bits.py`` has the third.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import PartialStores
from reports.verdict.deviation import Deviation
from reports.verdict.ledger import Ledger, bitwise_equal
from reports.verdict.rows import Rows, cat_rows, distinct, take_rows
from reports.verdict.subject import RankRoutes, Subject
from topology.sync import PADDING

RERUN: Final = "determinism: run to run"
BATCH: Final = "determinism: batch"
TOPOLOGY: Final = "determinism: topology"

_STAGES_OF_TOKENS: Final = (
    Stage.GLUE_IN,
    Stage.ROUTE,
    Stage.COMBINE,
    Stage.TAIL,
    Stage.GLUE_OUT,
)
"""Where every tensor has a row for each own row, or each layer row, of a rank."""

_OWN_ROWS: Final = ("own", "wire", "wire_scale")
"""Of glue_in: rows that a rank enters with."""

_MOST_OF_ONE_NAME: Final = 1 << 24
"""More than there are routes of one token and slot on a rank; one, unless a fault doubled it."""

_AT_ROUTES: Final[Mapping[Stage, tuple[str, ...]]] = MappingProxyType(
    {
        Stage.DISPATCH: ("hidden_states", "hidden_states_scale"),
        Stage.PRE_PERMUTE: ("rows.hidden_states", "rows.hidden_states_scale"),
        Stage.GEMM1: ("gate_up",),
        Stage.ACTIVATION: ("activation", "hidden_states", "hidden_states_scale"),
        Stage.GEMM2: ("output",),
        Stage.POST_PERMUTE: ("partial",),
    }
)
"""Where routes lie in an order that is free: received rows, grouped rows, and received again."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Values:
    """N rows of one tensor with their coordinates; not moved before they are compared.

    tensor  has the rows
    places  [N] int64 of the rows in it; None: they are all of it
    is_own  a row of those that ranks enter and leave with, which ranks that share tokens all hold
    """

    stage: Stage
    name: str
    rows: Rows
    tensor: Tensor
    places: Tensor | None = None
    is_own: bool = False

    def __getitem__(self, index: Tensor) -> "_Values":
        places = index if self.places is None else self.places[index]
        return replace(self, rows=self.rows[index], places=places)

    @property
    def cells(self) -> Tensor:
        """[N, C] of the rows."""
        rows = self.tensor if self.places is None else take_rows(self.tensor, self.places)
        return rows.flatten(1) if rows.dim() > 1 else rows[:, None]


_Pair = tuple[_Values, _Values]


def check_rerun(first: Subject, again: Subject, ledger: Ledger) -> None:
    """Compare two forwards of the same tokens on the same ranks up to the first stage that differs.

    Every traced value is compared, scales included, received and grouped rows where they lie in
    both runs, and what one of them has alone. Indices, counts and ways back are not: the rows that
    they lead to are.

    Args:
        first: the earlier forward.
        again: the later one.
        ledger: of the later one.
    """
    ours, theirs = (_named_routes(one, one.placed) for one in (again, first))
    ours_in_both = ours.order[torch.isin(ours.names, theirs.names)]
    theirs_in_both = theirs.order[torch.isin(theirs.names, ours.names)]

    def pairs(stage: Stage) -> Iterator[_Pair]:
        yield from zip(
            _values(again, ours_in_both, stage), _values(first, theirs_in_both, stage), strict=True
        )

    _enter_first_loss(RERUN, pairs, ledger, list(_other_routes(first, again)))


def check_batch(first: Subject, other: Subject, source: Tensor, ledger: Ledger) -> None:
    """Compare tokens that come among others, on other ranks, up to the first stage that differs.

    Args:
        first: a forward of the whole list.
        other: a forward, on the same ranks, of tokens of that list in other places.
        source: [tokens of ``other``] int64: which token of the list each of them is.
        ledger: of ``first``; ranks are those of ``other``, tokens those of the list.
    """
    last = last_stage_of_batch(first).position
    orders = [_named_routes(one, one.placed).order for one in (other, first)]

    def pairs(stage: Stage) -> Iterator[_Pair]:
        if stage.position <= last:
            sides = (_values(other, orders[0], stage), _values(first, orders[1], stage))
            for got, want in zip(*sides, strict=True):
                yield _matched(_renamed(got, source), want, first)

    _enter_first_loss(BATCH, pairs, ledger)


def last_stage_of_batch(subject: Subject) -> Stage:
    """Up to where a token's bits must not depend on the batch.

    Which replica of an expert serves a route depends on the row that the token stands in, and with
    it which of the token's routes are summed, and stored, together.
    """
    layer = subject.layer
    has_replicas = len(layer.slot_experts) > layer.num_experts
    sums_by_rank = subject.view.partials is not PartialStores.NOTHING
    return Stage.GEMM2 if has_replicas and sums_by_rank else Stage.GLUE_OUT


def _enter_first_loss(
    check: str,
    pairs: Callable[[Stage], Iterable[_Pair]],
    ledger: Ledger,
    others: Sequence[Deviation] = (),
) -> None:
    """Enter what differs in the first stage where anything does; the rest inherits it.

    Args:
        check: who asks.
        pairs: rows of a stage that both forwards have; read one tensor after the other.
        ledger: to enter it in.
        others: rows that only one of them has.
    """
    ledger.ask(check)
    for stage in sorted(Stage, key=lambda stage: stage.position):
        here = [deviation for deviation in others if deviation.stage is stage]
        for deviation in here:
            ledger.report(deviation)
        same = [_compare(check, *pair, ledger) for pair in pairs(stage)]
        if here or not all(same):
            return


def _values(subject: Subject, order: Tensor, stage: Stage) -> Iterator[_Values]:
    """All values of a stage: those of tokens, or those of routes in an order."""
    yield from _of_tokens(subject, stage)
    yield from _of_routes(subject, order, stage)


def _renamed(values: _Values, source: Tensor) -> _Values:
    """Rows of tokens alone, with the numbers that these have in the list they are from."""
    of_tokens = values[(values.rows.token != PADDING).nonzero()[:, 0]]
    rows = of_tokens.rows
    return replace(of_tokens, rows=replace(rows, token=source[rows.token]))


def _matched(got: _Values, want: _Values, subject: Subject) -> tuple[_Values, _Values]:
    """Rows of ``got`` that ``want`` has, too, and those rows of it.

    A row is named by token and slot, and where it is a part of something by the part: a rank's
    sum, a shard's columns. Behind the router slots may be others: the route stage's deviation.
    """
    ours, theirs = (_names(one, subject) for one in (got, want))
    ordered, place = theirs.sort(stable=True)
    at = torch.searchsorted(ordered, ours).clamp_max(max(len(ordered) - 1, 0))
    found = ours == ordered[at] if len(ordered) else torch.zeros_like(ours, dtype=torch.bool)
    return got[found.nonzero()[:, 0]], want[place[at[found]]]


def _names(values: _Values, subject: Subject) -> Tensor:
    """[N] a number for each row that says which token, slot and part it is; -1 is padding."""
    rows, layer = values.rows, subject.layer
    part = torch.zeros_like(rows.rank)
    if values.stage is Stage.POST_PERMUTE or not (values.is_own or layer.is_all_to_all):
        part = rows.rank
    elif values.stage in _AT_ROUTES:
        part = torch.tensor([layer.expert_shard(rank).index for rank in subject.ranks])[rows.rank]
    tokens, slots = len(subject.hidden_states), layer.top_k + 1
    name = (part * tokens + rows.token) * slots + rows.slot + 1
    return name.masked_fill(rows.token == PADDING, -1)


def _of_tokens(subject: Subject, stage: Stage) -> Iterator[_Values]:
    for name in subject.stage(stage, 0) if stage in _STAGES_OF_TOKENS else ():
        is_own = stage is Stage.GLUE_OUT or (stage is Stage.GLUE_IN and name in _OWN_ROWS)
        holders = [rank for rank in subject.ranks if name in subject.stage(stage, rank)]
        rows = subject.own_rows_of(holders) if is_own else subject.rows_of(holders)
        tensor = subject.tensor_of(holders, stage, name)
        yield _Values(stage=stage, name=name, rows=rows, tensor=tensor, is_own=is_own)


def _of_routes(subject: Subject, order: Tensor, stage: Stage) -> Iterator[_Values]:
    received = stage in (Stage.DISPATCH, Stage.POST_PERMUTE)
    for name in _AT_ROUTES.get(stage, ()):
        if name not in subject.stage(stage, 0):
            continue
        parts = [
            take_rows(
                subject.grouped(stage, rank, name),
                subject.placed[rank].received if received else subject.placed[rank].row,
            )
            for rank in subject.ranks
        ]
        rows, tensor = subject.route_rows, cat_rows(parts)
        yield _Values(stage=stage, name=name, rows=rows, tensor=tensor)[order]


class _NamedRoutes(NamedTuple):
    """Routes of tokens by rank, token and slot.

    order  [N] int64 their places among the routes of all ranks
    names  [N] int64 ascending, no two the same: rank, token, slot, and which of several it is
    """

    order: Tensor
    names: Tensor


def _named_routes(subject: Subject, routes: Sequence[RankRoutes]) -> _NamedRoutes:
    """Name the routes of all ranks; a fault may have doubled one."""
    rows = _rows_of(routes)
    of_tokens = (rows.token != PADDING).nonzero()[:, 0]
    tokens = len(subject.hidden_states) + 1
    key = ((rows.rank * tokens + rows.token) * subject.layer.top_k + rows.slot)[of_tokens]
    key, order = key.sort(stable=True)
    occurrence = torch.arange(len(key)) - torch.searchsorted(key, key)
    return _NamedRoutes(order=of_tokens[order], names=key * _MOST_OF_ONE_NAME + occurrence)


def _other_routes(first: Subject, again: Subject) -> Iterator[Deviation]:
    """Routes that one of two forwards of the same tokens has received, or placed, alone."""
    received, placed = (first.routes, again.routes), (first.placed, again.placed)
    for stage, (before, now) in ((Stage.DISPATCH, received), (Stage.PRE_PERMUTE, placed)):
        was, got = _named_routes(first, before), _named_routes(again, now)
        gone = _rows_of(before)[was.order[~torch.isin(was.names, got.names)]]
        new = _rows_of(now)[got.order[~torch.isin(got.names, was.names)]]
        either = Rows.cat([gone, new])
        for rank in distinct(either.rank):
            is_here = either.rank == rank
            at, lost = int(is_here.nonzero()[0]), int((gone.rank == rank).sum())
            count = int(is_here.sum())
            yield Deviation(
                check=RERUN,
                stage=stage,
                rank=rank,
                tensor="routes",
                token=int(either.token[at]),
                slot=int(either.slot[at]),
                expert=int(either.expert[at]),
                rows=count,
                detail=f"{lost} of the earlier forward's are gone, {count - lost} are new",
            )


def _rows_of(routes: Sequence[RankRoutes]) -> Rows:
    return Rows.cat([one.rows for one in routes])


def _compare(check: str, got: _Values, want: _Values, ledger: Ledger) -> bool:
    """Whether every bit is the same; what is not is entered."""
    ours, theirs = got.cells, want.cells
    legal = bitwise_equal(ours, theirs)
    if bool(legal.all()):
        return True
    for rank in distinct(got.rows.rank):
        here = (got.rows.rank == rank).nonzero()[:, 0]
        mine, due = (take_rows(one, here).to(torch.float64) for one in (ours, theirs))
        ledger.steps(
            check, got.stage, got.name, got.rows[here], got=mine, want=due, legal=legal[here]
        )
    return False

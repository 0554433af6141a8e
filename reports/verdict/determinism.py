"""Whether the same tokens give the same bits again, and the first stage where they do not.

Two questions of one topology: does a list that comes again repeat itself, and does what else is in
the batch, or on the rank, change a token? ``topology_bits.py`` has the third.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import PartialStores
from reports.verdict.ledger import Ledger, bitwise_equal
from reports.verdict.rows import Rows, cat_rows, take_rows
from reports.verdict.subject import Subject
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
    """One tensor's rows [N, C] with their coordinates.

    is_own  a row of those that ranks enter and leave with, which ranks that share tokens all hold
    """

    stage: Stage
    name: str
    rows: Rows
    tensor: Tensor
    is_own: bool = False

    def __getitem__(self, index: Tensor) -> "_Values":
        return _Values(
            stage=self.stage,
            name=self.name,
            rows=self.rows[index],
            tensor=take_rows(self.tensor, index),
            is_own=self.is_own,
        )


def check_rerun(first: Subject, again: Subject, ledger: Ledger) -> None:
    """Compare two forwards of the same tokens on the same ranks up to the first stage that differs.

    Every traced value is compared, scales included, received and grouped rows where they lie in
    either run. Indices, counts and ways back are not: the rows that they lead to are.

    Args:
        first: the earlier forward.
        again: the later one.
        ledger: of the later one.
    """
    pairs = list(zip(_of_tokens(again), _of_tokens(first), strict=True))
    orders = [_canonical_order(one) for one in (again, first)]
    if torch.equal(*(_keys(one)[order] for one, order in zip((again, first), orders, strict=True))):
        pairs += zip(_of_routes(again, orders[0]), _of_routes(first, orders[1]), strict=True)
    # Other routes are a deviation of the route stage, and entered there.
    _enter_first_loss(RERUN, pairs, ledger)


def check_batch(first: Subject, other: Subject, source: Tensor, ledger: Ledger) -> None:
    """Compare tokens that come among others, on other ranks, up to the first stage that differs.

    Args:
        first: a forward of the whole list.
        other: a forward, on the same ranks, of tokens of that list in other places.
        source: [tokens of ``other``] int64: which token of the list each of them is.
        ledger: of ``first``; ranks are those of ``other``, tokens those of the list.
    """
    last = last_stage_of_batch(first).position
    pairs = [
        _matched(_renamed(got, source), want, first)
        for got, want in zip(_every(other), _every(first), strict=True)
        if want.stage.position <= last
    ]
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


def _enter_first_loss(check: str, pairs: list[tuple[_Values, _Values]], ledger: Ledger) -> None:
    """Enter what differs in the first stage where anything does; the rest inherits it."""
    ledger.ask(check)
    lost: Stage | None = None
    for got, want in sorted(pairs, key=lambda pair: pair[0].stage.position):
        if lost not in (None, got.stage):
            return
        if not _compare(check, got, want, ledger):
            lost = got.stage


def _every(subject: Subject) -> Iterator[_Values]:
    """All values of tokens, those of routes by rank, token and slot."""
    yield from _of_tokens(subject)
    yield from _of_routes(subject, _canonical_order(subject))


def _renamed(values: _Values, source: Tensor) -> _Values:
    """Rows of tokens alone, with the numbers that these have in the list they are from."""
    of_tokens = values[(values.rows.token != PADDING).nonzero()[:, 0]]
    rows = of_tokens.rows
    renamed = Rows(rank=rows.rank, token=source[rows.token], slot=rows.slot, expert=rows.expert)
    return _Values(
        stage=values.stage,
        name=values.name,
        rows=renamed,
        tensor=of_tokens.tensor,
        is_own=values.is_own,
    )


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


def _of_tokens(subject: Subject) -> Iterator[_Values]:
    for stage in _STAGES_OF_TOKENS:
        for name in subject.stage(stage, 0):
            is_own = stage is Stage.GLUE_OUT or (stage is Stage.GLUE_IN and name in _OWN_ROWS)
            holders = [rank for rank in subject.ranks if name in subject.stage(stage, rank)]
            rows = subject.own_rows_of(holders) if is_own else subject.rows_of(holders)
            tensor = subject.tensor_of(holders, stage, name)
            yield _Values(stage=stage, name=name, rows=rows, tensor=tensor, is_own=is_own)


def _of_routes(subject: Subject, order: Tensor) -> Iterator[_Values]:
    for stage, names in _AT_ROUTES.items():
        received = stage in (Stage.DISPATCH, Stage.POST_PERMUTE)
        for name in names:
            if name not in subject.stage(stage, 0):
                continue
            parts = [
                take_rows(
                    subject.grouped(stage, rank, name),
                    subject.placed[rank].received if received else subject.placed[rank].row,
                )
                for rank in subject.ranks
            ]
            tensor = take_rows(cat_rows(parts), order)
            yield _Values(stage=stage, name=name, rows=subject.route_rows[order], tensor=tensor)


def _keys(subject: Subject) -> Tensor:
    """[N] one number for each of ``route_rows``: rank, token and slot."""
    rows = subject.route_rows
    tokens = len(subject.hidden_states) + 1
    return (rows.rank * tokens + rows.token) * subject.layer.top_k + rows.slot


def _canonical_order(subject: Subject) -> Tensor:
    """Places of the routes of tokens among ``route_rows``, by rank, token and slot."""
    of_tokens = (subject.route_rows.token != PADDING).nonzero()[:, 0]
    return of_tokens[torch.argsort(_keys(subject)[of_tokens])]


def _compare(check: str, got: _Values, want: _Values, ledger: Ledger) -> bool:
    """Whether every bit is the same; what is not is entered."""
    ours, theirs = (
        one.tensor.flatten(1) if one.tensor.dim() > 1 else one.tensor[:, None]
        for one in (got, want)
    )
    legal = bitwise_equal(ours, theirs)
    if bool(legal.all()):
        return True
    ours, theirs = ours.to(torch.float64), theirs.to(torch.float64)
    ledger.steps(check, got.stage, got.name, got.rows, got=ours, want=theirs, legal=legal)
    return False

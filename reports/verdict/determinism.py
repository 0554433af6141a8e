"""Whether the same tokens give the same bits again, and the first stage where they do not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.ledger import Ledger, bitwise_equal
from reports.verdict.rows import Rows, cat_rows, take_rows
from reports.verdict.subject import Subject
from topology.sync import PADDING

RERUN: Final = "determinism: run to run"

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
    """One tensor's rows [N, C] with their coordinates."""

    stage: Stage
    name: str
    rows: Rows
    tensor: Tensor


def check_rerun(first: Subject, again: Subject, ledger: Ledger) -> None:
    """Compare two forwards of the same tokens on the same ranks, stage by stage, in every bit.

    Every traced value is compared, scales included, received and grouped rows where they lie in
    either run. Indices, counts and ways back are not: the rows that they lead to are.

    Args:
        first: the earlier forward.
        again: the later one.
        ledger: of the later one.
    """
    ledger.ask(RERUN)
    for got, want in zip(_of_tokens(again), _of_tokens(first), strict=True):
        _compare(got, want, ledger)
    orders = [_canonical_order(one) for one in (again, first)]
    if torch.equal(*(_keys(one)[order] for one, order in zip((again, first), orders, strict=True))):
        for got, want in zip(
            _of_routes(again, orders[0]), _of_routes(first, orders[1]), strict=True
        ):
            _compare(got, want, ledger)
    # Other routes are a deviation of the route stage, and entered there.


def _of_tokens(subject: Subject) -> Iterator[_Values]:
    for stage in _STAGES_OF_TOKENS:
        for name in subject.stage(stage, 0):
            is_own = stage is Stage.GLUE_OUT or (stage is Stage.GLUE_IN and name in _OWN_ROWS)
            holders = [rank for rank in subject.ranks if name in subject.stage(stage, rank)]
            rows = subject.own_rows_of(holders) if is_own else subject.rows_of(holders)
            tensor = subject.tensor_of(holders, stage, name)
            yield _Values(stage=stage, name=name, rows=rows, tensor=tensor)


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


def _compare(got: _Values, want: _Values, ledger: Ledger) -> None:
    ours, theirs = (
        one.tensor.flatten(1) if one.tensor.dim() > 1 else one.tensor[:, None]
        for one in (got, want)
    )
    legal = bitwise_equal(ours, theirs)
    if not bool(legal.all()):
        ours, theirs = ours.to(torch.float64), theirs.to(torch.float64)
        ledger.steps(RERUN, got.stage, got.name, got.rows, got=ours, want=theirs, legal=legal)

"""Integers that must add up, without any tolerance: routes, rows, collectives and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.calls_due import calls_due, check_group_calls
from reports.verdict.captured import where_captured
from reports.verdict.deviation import Deviation, NotAsked
from reports.verdict.formats.view import DueCall
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import ACCOUNTS
from reports.verdict.subject import Subject
from topology.collectives import CollectiveCall
from topology.mesh import Group


def check_accounts(
    subject: Subject, calls: Sequence[Sequence[CollectiveCall]] | None, ledger: Ledger
) -> None:
    """Every route is sent, received, computed and combined exactly once; every byte is due."""
    if calls is not None:
        check_group_calls([calls_due(subject, rank) for rank in subject.ranks], ledger)
    for rank in subject.ranks:
        for what, check in (
            ("counts of routes", _check_routes),
            ("arrivals", subject.view.check_arrivals),
            ("sources of grouped rows", _check_one_source_a_row),
        ):
            with where_captured(ledger, what, ACCOUNTS):
                check(subject, rank, ledger)
                ledger.ask(ACCOUNTS)
        if calls is not None:
            _check_calls(subject, rank, calls[rank], ledger)
    if calls is None:
        why = "a trace holds no collectives"
        ledger.put_aside(NotAsked(check=ACCOUNTS, what="calls and bytes", why=why))


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Routes of one rank before and after a stage, [source ranks, slots] each."""

    stage: Stage
    what: str
    before: Tensor
    after: Tensor


def _check_routes(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Routes of each (source rank, slot): as due, received, computed, combined."""
    routes, placed = subject.routes[rank], subject.placed[rank]
    again, slot = subject.view.combined(subject, rank)
    due = subject.view.routes_due(subject, rank)

    def counted(rows: Tensor, slots: Tensor) -> Tensor:
        source = subject.layer_rows.rank[subject.received_from[rank][rows]]  # a route has one
        table = torch.zeros_like(due)
        return table.index_put_((source, slots), torch.ones_like(source), accumulate=True)

    received = counted(routes.received, routes.local)
    computed = counted(placed.received, placed.local)
    combined = counted(again, slot)
    for step in (
        _Step(Stage.DISPATCH, "received", due, received),
        _Step(Stage.PRE_PERMUTE, "given a grouped row", received, computed),
        _Step(Stage.PRE_PERMUTE, "handed on by post-permute", computed, combined),
    ):
        _compare_routes(subject, rank, ledger, step)


def _compare_routes(subject: Subject, rank: int, ledger: Ledger, step: _Step) -> None:
    wrong = (step.before != step.after).nonzero()
    if wrong.numel():
        source, slot = wrong[0].tolist()
        got, want = int(step.after[source, slot]), int(step.before[source, slot])
        expert = subject.layer.local_experts(rank)[slot]
        ledger.report(
            Deviation(
                check=ACCOUNTS,
                stage=step.stage,
                rank=rank,
                tensor="routes",
                expert=expert,
                got=float(got),
                want=float(want),
                rows=int((step.before != step.after).any(0).sum()),
                detail=f"of {want} routes from rank {source} to expert {expert}, "
                f"{got} were {step.what}",
            )
        )


def _check_one_source_a_row(subject: Subject, rank: int, ledger: Ledger) -> None:
    """No two routes share a grouped row."""
    count = torch.bincount(subject.placed[rank].row, minlength=1)
    shared = (count > 1).nonzero()[:, 0]
    if shared.numel():
        ledger.report(
            Deviation(
                check=ACCOUNTS,
                stage=Stage.PRE_PERMUTE,
                rank=rank,
                tensor="restore.output_index",
                rows=shared.numel(),
                detail=f"grouped row {int(shared[0])} has more than one source",
            )
        )


_Call = tuple[str, str, Group]


def _check_calls(
    subject: Subject, rank: int, made: Sequence[CollectiveCall], ledger: Ledger
) -> None:
    """A rank makes the calls of its topology and dispatch format, in order, and no others."""
    made = [call for call in made if call.stage != Stage.WEIGHTS]
    due = calls_due(subject, rank)
    names_made = [(str(call.stage), call.op, call.group) for call in made]
    names_due = [(str(call.stage), call.op, call.group) for call in due]
    if names_made != names_due:
        ledger.report(
            Deviation(
                check=ACCOUNTS,
                stage=_parting(names_made, names_due),
                rank=rank,
                tensor="collectives",
                detail=f"calls {_listed(names_made)}; due are {_listed(names_due)}",
            )
        )
        _check_bytes(rank, made, due, ledger)
        return
    _check_sizes(rank, made, due, ledger)


def _check_bytes(
    rank: int, made: Sequence[CollectiveCall], due: Sequence[DueCall], ledger: Ledger
) -> None:
    """Whatever is called, every stage moves the bytes that topology and routes call for."""
    for stage in Stage:
        moved = sum(call.payload_bytes for call in made if call.stage == stage)
        owed = sum(call.payload_bytes for call in due if call.stage is stage)
        if moved != owed:
            _report_bytes(rank, stage, moved, owed, ledger)


def _check_sizes(
    rank: int, made: Sequence[CollectiveCall], due: Sequence[DueCall], ledger: Ledger
) -> None:
    """Every call moves exactly those bytes; the first of a stage that does not is reported."""
    reported: set[Stage] = set()
    for call, owed in zip(made, due, strict=True):
        if call.payload_bytes != owed.payload_bytes and owed.stage not in reported:
            reported.add(owed.stage)
            _report_bytes(rank, owed.stage, call.payload_bytes, owed.payload_bytes, ledger, call.op)


def _report_bytes(
    rank: int, stage: Stage, moved: int, owed: int, ledger: Ledger, op: str = ""
) -> None:
    into = f" into {op}" if op else ""
    ledger.report(
        Deviation(
            check=ACCOUNTS,
            stage=stage,
            rank=rank,
            tensor="payload",
            got=float(moved),
            want=float(owed),
            detail=f"sent {moved} bytes{into} where topology and routes call for {owed}",
        )
    )


def _parting(made: Sequence[_Call], due: Sequence[_Call]) -> Stage:
    """Stage of the first call that is missing, wrong or one too many."""
    pairs = zip_longest(made, due)
    here, there = next((here, there) for here, there in pairs if here != there)
    return Stage(min((call[0] for call in (here, there) if call), key=lambda s: Stage(s).position))


def _listed(calls: Sequence[_Call]) -> str:
    return ", ".join(f"{stage}/{op} of {list(group)}" for stage, op, group in calls) or "nothing"

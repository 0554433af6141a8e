"""Integers that must add up, without any tolerance: routes, rows, collectives and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.subject import JudgedLayer, Subject
from topology.collectives import CollectiveCall

ACCOUNTS = "accounts"


def check_accounts(
    subject: Subject, calls: Sequence[Sequence[CollectiveCall]], ledger: Ledger
) -> None:
    """Every route is sent, received, computed and combined exactly once; every byte is due."""
    ledger.ask(ACCOUNTS)
    _check_routes(subject, ledger)
    for rank in subject.ranks:
        _check_one_row_a_token(subject, rank, ledger)
        _check_one_source_a_row(subject, rank, ledger)
    _check_order_of_collectives(subject.layer, calls, ledger)
    _check_bytes(subject, calls, ledger)


def _check_routes(subject: Subject, ledger: Ledger) -> None:
    """Routes of each (source rank, expert): as routed, received, computed, combined."""
    layer = subject.layer
    sent = torch.zeros(layer.world_size, layer.num_experts, dtype=torch.int64)
    received, computed, combined = (torch.zeros_like(sent) for _ in range(3))
    for rank in subject.ranks:
        ids = subject.stage(Stage.ROUTE, rank)["topk_ids"].to(torch.int64)
        legal = ids[(ids >= 0) & (ids < layer.num_experts)]
        sent[rank] += torch.bincount(legal, minlength=layer.num_experts)
        source = subject.stage(Stage.DISPATCH, rank)["handle.source_rank"]
        routes, placed = subject.routes[rank], subject.placed[rank]
        _count(received, source[routes.received], routes.rows.expert)
        _count(computed, source[placed.received], placed.rows.expert)
        _count(combined, *_combined_routes(subject, rank, source))
    for step in (
        _Step(Stage.DISPATCH, "received", sent, received),
        _Step(Stage.PRE_PERMUTE, "given a grouped row", received, computed),
        _Step(Stage.PRE_PERMUTE, "handed to post-permute", computed, combined),
    ):
        _compare_routes(subject, ledger, step)


def _combined_routes(subject: Subject, rank: int, source: Tensor) -> tuple[Tensor, Tensor]:
    """(source rank, expert) of every slot that post-permute is told to add up."""
    experts = torch.tensor(subject.layer.local_experts[rank])
    ids = subject.stage(Stage.PRE_PERMUTE, rank)["restore.topk_ids"]
    row, slot = ((ids >= 0) & (ids < len(experts))).nonzero(as_tuple=True)
    return source[row], experts[ids[row, slot]]


def _count(table: Tensor, source: Tensor, expert: Tensor) -> None:
    table.index_put_((source, expert), torch.ones_like(source), accumulate=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Routes before and after a stage, [source ranks, experts] each."""

    stage: Stage
    what: str
    before: Tensor
    after: Tensor


def _compare_routes(subject: Subject, ledger: Ledger, step: _Step) -> None:
    before, after = step.before, step.after
    wrong = (before != after).nonzero()
    seen: set[int] = set()
    for source, expert in wrong.tolist():
        rank = subject.layer.expert_rank[expert]
        if rank in seen:
            continue
        seen.add(rank)
        ledger.report(
            Deviation(
                check=ACCOUNTS,
                stage=step.stage,
                rank=rank,
                tensor="routes",
                expert=expert,
                got=float(after[source, expert]),
                want=float(before[source, expert]),
                rows=int((before != after).any(0).sum()),
                detail=f"of {int(before[source, expert])} routes from rank {source} to expert "
                f"{expert}, {int(after[source, expert])} were {step.what}",
            )
        )


def _check_one_row_a_token(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Each token is dispatched to a rank once, and only if it has an expert there."""
    tokens = subject.received_tokens[rank]
    count = torch.bincount(tokens, minlength=subject.hidden_states.shape[0])
    due = _tokens_due(subject, rank)
    wrong = (count != due).nonzero()[:, 0]
    if wrong.numel():
        token = int(wrong[0])
        ledger.report(
            Deviation(
                check=ACCOUNTS,
                stage=Stage.DISPATCH,
                rank=rank,
                tensor="handle.source_row",
                token=token,
                got=float(count[token]),
                want=float(due[token]),
                rows=wrong.numel(),
                detail=f"token {token} arrived {int(count[token])} times, due {int(due[token])}",
            )
        )


def _tokens_due(subject: Subject, rank: int) -> Tensor:
    """[T] 1 where a token has at least one expert on the rank."""
    ids = subject.token_tensor(Stage.ROUTE, "topk_ids")
    experts = torch.tensor(subject.layer.local_experts[rank])
    return torch.isin(ids.to(torch.int64), experts).any(dim=1).to(torch.int64)


def _check_one_source_a_row(subject: Subject, rank: int, ledger: Ledger) -> None:
    """No two routes share a grouped row; segments are as long as announced."""
    placed = subject.placed[rank]
    num_rows = subject.stage(Stage.PRE_PERMUTE, rank)["rows.m_indices"].shape[0]
    shared = (torch.bincount(placed.row, minlength=num_rows) > 1).nonzero()[:, 0]
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


_Calls = tuple[tuple[str, str, tuple[int, ...]], ...]


def _check_order_of_collectives(
    layer: JudgedLayer, calls: Sequence[Sequence[CollectiveCall]], ledger: Ledger
) -> None:
    """Every rank makes the calls of its dispatch format, on its EP group, and no others."""
    for rank, made in enumerate(calls):
        in_forward = tuple(
            (call.stage, call.op, call.group) for call in made if call.stage != Stage.WEIGHTS
        )
        due = tuple((str(stage), op, layer.groups[rank]) for stage, op in layer.collectives)
        if in_forward != due:
            ledger.report(
                Deviation(
                    check=ACCOUNTS,
                    stage=_parting(in_forward, due),
                    rank=rank,
                    tensor="collectives",
                    detail=f"calls {_listed(in_forward)}; due are {_listed(due)}",
                )
            )


def _parting(made: _Calls, due: _Calls) -> Stage:
    """Stage of the first call that is missing, wrong or one too many."""
    pairs = zip_longest(made, due)
    here, there = next((here, there) for here, there in pairs if here != there)
    return Stage(min((call[0] for call in (here, there) if call), key=lambda s: Stage(s).position))


def _listed(calls: _Calls) -> str:
    return ", ".join(f"{stage}/{op} of {list(group)}" for stage, op, group in calls) or "nothing"


def _check_bytes(
    subject: Subject, calls: Sequence[Sequence[CollectiveCall]], ledger: Ledger
) -> None:
    """Dispatch and combine move exactly the rows that the routes call for."""
    for rank in subject.ranks:
        traced = subject.stage(Stage.DISPATCH, rank)
        for stage, due in (
            (Stage.DISPATCH, _dispatch_bytes(subject, rank)),
            (Stage.COMBINE, traced["topk_ids"].shape[0] * subject.layer.hidden_size * 2),
        ):
            moved = sum(call.payload_bytes for call in calls[rank] if call.stage == stage)
            if moved != due:
                ledger.report(
                    Deviation(
                        check=ACCOUNTS,
                        stage=stage,
                        rank=rank,
                        tensor="payload",
                        got=float(moved),
                        want=float(due),
                        detail=f"sent {moved} bytes where the routes call for {due}",
                    )
                )


def _dispatch_bytes(subject: Subject, rank: int) -> int:
    """Counts for every rank, then one row (data, scales, ids, weights, source) a message."""
    traced, layer = subject.stage(Stage.DISPATCH, rank), subject.layer
    owner = torch.tensor([*layer.expert_rank, -1])[subject.routed_ids(rank)].sort(dim=1).values
    first_of_its_rank = torch.ones_like(owner, dtype=torch.bool)
    first_of_its_rank[:, 1:] = owner[:, 1:] != owner[:, :-1]
    messages = int((first_of_its_rank & (owner >= 0)).sum())
    scale = traced.get("wire_scale")
    row = traced["wire"].shape[1] * traced["wire"].element_size()
    row += 0 if scale is None else scale.shape[1] * scale.element_size()
    row += layer.top_k * (8 + 4) + 8
    counts = len(layer.groups[rank]) * (1 + len(layer.local_experts[rank])) * 8
    return messages * row + counts

"""Whose route it is, and reports about counts: what several formats' checks share."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.deviation import Deviation
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import CONTRACT, broken
from reports.verdict.subject import Subject


def owner_of_slot(layer: JudgedLayer, physical_ids: Tensor) -> Tensor:
    """[...] int64 EP rank that holds each physical slot; -1 for an id that names none."""
    ids = physical_ids.to(torch.int64)
    is_slot = (ids >= 0) & (ids < len(layer.slot_experts))
    return torch.where(is_slot, ids // layer.slots_per_rank, -1)


def local_slots(layer: JudgedLayer, rank: int, physical_ids: Tensor) -> Tensor:
    """[...] int64 slots as the rank counts its own, -1 for those of other ranks."""
    first = layer.ep_rank(rank) * layer.slots_per_rank
    mine = owner_of_slot(layer, physical_ids) == layer.ep_rank(rank)
    return torch.where(mine, physical_ids.to(torch.int64) - first, -1)


def check_counts(
    subject: Subject,
    rank: int,
    ledger: Ledger,
    stage: Stage,
    tensor: str,
    due: Tensor,
    detail: Callable[[int, int, Sequence[int]], str],
) -> None:
    """Contract: a rank counts for each of its slots what is due.

    Args:
        subject: the forward.
        rank: whose slots.
        ledger: takes the findings, one a count.
        stage: where the counts are traced.
        tensor: their name there.
        due: [L] or [L, P] integers, as the traced ones.
        detail: words for a wrong count, the due one, and its place.
    """
    got, experts = subject.stage(stage, rank)[tensor], subject.layer.local_experts(rank)
    for place in (got != due).nonzero().tolist():
        count, want = int(got[tuple(place)]), int(due[tuple(place)])
        ledger.report(
            Deviation(
                check=CONTRACT,
                stage=stage,
                rank=rank,
                tensor=tensor,
                expert=experts[place[0]],
                got=float(count),
                want=float(want),
                detail=detail(count, want, place),
            )
        )


def check_output_index(
    subject: Subject, rank: int, ledger: Ledger, local_ids: Tensor | None = None
) -> None:
    """Contract: exactly the routes of this rank's slots have a grouped row.

    Args:
        subject: the forward.
        rank: whose rows.
        ledger: takes the finding.
        local_ids: [R, K] slots of this rank that the received rows name, -1 = none; None: as
            dispatch hands them over.
    """
    if local_ids is None:
        local_ids = subject.stage(Stage.DISPATCH, rank)["topk_ids"]
    is_route = local_ids >= 0
    index = subject.stage(Stage.PRE_PERMUTE, rank)["restore.output_index"]
    wrong = (is_route != (index >= 0)).nonzero()
    if wrong.numel():
        row, slot = wrong[0].tolist()
        token = int(subject.received_rows(rank).token[row])
        local = "a local" if is_route[row, slot] else "no local"
        detail = f"output_index {int(index[row, slot])} where there is {local} route"
        broken(
            ledger,
            Stage.PRE_PERMUTE,
            rank,
            "restore.output_index",
            detail,
            token=None if token < 0 else token,
            slot=slot,
        )

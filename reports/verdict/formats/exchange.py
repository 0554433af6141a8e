"""What formats share that send a token once to every rank that owns one of its experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.band import fp32_noise
from reports.verdict.compared import check_stored
from reports.verdict.deviation import Deviation
from reports.verdict.formats.routes import local_slots, owner_of_slot
from reports.verdict.formats.view import DueCall
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import ACCOUNTS
from reports.verdict.subject import Subject
from topology.sync import PADDING


def routes_to_owner(subject: Subject, rank: int) -> Tensor:
    """[P, L] int64: a route is due on the rank that owns its slot, wherever its token is."""
    world, slots = subject.layer.world_size, subject.layer.slots_per_rank
    ids = subject.layer_tensor(Stage.DISPATCH, "physical_ids")
    local = local_slots(subject.layer, rank, ids)
    cell = (subject.layer_rows.rank[:, None] * slots + local)[local >= 0]
    return torch.bincount(cell, minlength=world * slots).view(world, slots)


def arrivals_due(subject: Subject, rank: int) -> Tensor:
    """[all layer rows] int64: how often each is due on a rank: once if it has an expert there."""
    ids = subject.layer_tensor(Stage.DISPATCH, "physical_ids")
    return (local_slots(subject.layer, rank, ids) >= 0).any(dim=1).to(torch.int64)


def messages_due(subject: Subject, rank: int) -> int:
    """Distinct (token, destination) pairs of the routes of a rank's layer rows."""
    ids = subject.stage(Stage.DISPATCH, rank)["physical_ids"]
    owner = owner_of_slot(subject.layer, ids).sort(dim=1).values
    first_of_its_rank = torch.ones_like(owner, dtype=torch.bool)
    first_of_its_rank[:, 1:] = owner[:, 1:] != owner[:, :-1]
    return int((first_of_its_rank & (owner >= 0)).sum())


def exchange_calls(
    subject: Subject, rank: int, *, counts: int, rows: int, returned: int
) -> Sequence[DueCall]:
    """Counts, then rows; then the way back. All in bytes that a rank hands in."""
    return [
        DueCall(
            stage=stage,
            op="all_to_all_v",
            group=subject.layer.layout.ep_group(rank),
            payload_bytes=payload,
        )
        for stage, payload in (
            (Stage.DISPATCH, counts),
            (Stage.DISPATCH, rows),
            (Stage.COMBINE, returned),
        )
    ]


def check_arrivals_due(subject: Subject, rank: int, tensor: str, ledger: Ledger) -> None:
    """Account: each row is dispatched to a rank once, and only if it has an expert there.

    Args:
        subject: the forward.
        rank: the receiver.
        tensor: name of what says whose a received row is.
        ledger: takes the finding.
    """
    source = subject.received_from[rank]
    count = torch.bincount(source[source >= 0], minlength=len(subject.layer_rows))
    due = arrivals_due(subject, rank)
    wrong = (count != due).nonzero()[:, 0]
    if wrong.numel():
        row = int(wrong[0])
        where = Arrival(rank=rank, tensor=tensor, row=row, rows=len(wrong))
        report_arrival(subject, ledger, where, int(count[row]), int(due[row]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What arrived more often or less often than it should.

    tensor  name of what says whose a received row is
    row     place among ``layer_rows``
    rows    how many places are wrong
    slot    top-k slot, where routes arrive
    expert  logical expert, where experts receive
    """

    rank: int
    tensor: str
    row: int
    rows: int
    slot: int | None = None
    expert: int | None = None


def report_arrival(subject: Subject, ledger: Ledger, where: Arrival, got: int, want: int) -> None:
    """Enter that something arrived ``got`` times where ``want`` is due."""
    token = int(subject.layer_rows.token[where.row])
    of_slot = "" if where.slot is None else f"slot {where.slot} of "
    at_expert = "" if where.expert is None else f" at expert {where.expert}"
    ledger.report(
        Deviation(
            check=ACCOUNTS,
            stage=Stage.DISPATCH,
            rank=where.rank,
            tensor=where.tensor,
            token=None if token == PADDING else token,
            slot=where.slot,
            expert=where.expert,
            got=float(got),
            want=float(want),
            rows=where.rows,
            detail=f"{of_slot}token {token} arrived {got} times{at_expert}, due {want}",
        )
    )


def check_partials_combined(subject: Subject, ledger: Ledger) -> None:
    """Each row's partials of all ranks, added in fp32 in any order and rounded once."""
    want, magnitude, count = _partials_at_home(subject)
    check_routed(
        subject, ledger, want, fp32_noise(magnitude, int(count.max()) if len(count) else 0)
    )


def check_routed(subject: Subject, ledger: Ledger, want: Tensor, noise: Tensor) -> None:
    """What combine gives: [all layer rows, H] float64 sums that carry ``noise``, stored once.

    Sums over padded experts are wider; their last columns do not return.
    """
    want, noise = (sums[:, : subject.layer.hidden_size] for sums in (want, noise))
    check_stored(
        ledger,
        Stage.COMBINE,
        "routed",
        subject.layer_rows,
        got=subject.layer_tensor(Stage.COMBINE, "routed").to(torch.float64),
        want=want,
        noise=noise,
    )


def _partials_at_home(subject: Subject) -> tuple[Tensor, Tensor, Tensor]:
    """[all layer rows, H] sums of the traced partials and of their magnitudes, and how many.

    Received rows that hold no layer row add nothing.
    """
    shape = (len(subject.layer_rows), subject.layer.expert_hidden_size)
    value, magnitude = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    count = torch.zeros(shape[0], dtype=torch.int64)
    for rank in subject.ranks:
        has_source = subject.received_from[rank] >= 0
        source = subject.received_from[rank][has_source]
        partial = subject.stage(Stage.POST_PERMUTE, rank)["partial"][has_source].to(torch.float64)
        value.index_add_(0, source, partial)
        magnitude.index_add_(0, source, partial.abs())
        count += torch.bincount(source, minlength=shape[0])
    return value, magnitude, count

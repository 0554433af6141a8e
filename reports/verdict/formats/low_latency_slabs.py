"""Low-latency slabs: whose a row is, and the contract of their counts and chunks."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe.formats import Stage
from moe.trace import StageTensors
from reports.verdict.formats.routes import check_counts, local_slots
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import broken
from reports.verdict.subject import Subject


def source_ranks(subject: Subject, rank: int) -> Tensor:
    """[L * S] int64: the rank whose chunk a slab row lies in; -1 = in nobody's."""
    traced = subject.stage(Stage.DISPATCH, rank)
    begin, count = traced["handle.begin"][:, :, None], traced["handle.count"][:, :, None]
    place = torch.arange(traced["handle.source_row"].shape[1])
    is_in_LPS = (place >= begin) & (place < begin + count)
    group = torch.tensor(subject.layer.layout.ep_group(rank))
    first = group[is_in_LPS.to(torch.uint8).argmax(1)]
    return torch.where(is_in_LPS.any(1), first, -1).flatten()


def slots_called_for(subject: Subject, rank: int, source: Tensor, local: Tensor) -> Tensor:
    """[N] int64: the top-k slot of each arrived row; -1 where its source calls for none (more).

    Args:
        subject: the forward.
        rank: where the rows arrived.
        source: [N] place among ``layer_rows``.
        local: [N] slot of the rank.
    """
    slots = subject.layer.slots_per_rank
    ids = local_slots(subject.layer, rank, subject.layer_tensor(Stage.DISPATCH, "physical_ids"))
    row, slot = (ids >= 0).nonzero(as_tuple=True)
    called, order = (row * slots + ids[row, slot]).sort(stable=True)
    arrived, by_cell = (source * slots + local).sort(stable=True)
    number = torch.arange(len(arrived)) - torch.searchsorted(arrived, arrived)
    at = torch.searchsorted(called, arrived) + number
    fits = at < torch.searchsorted(called, arrived, right=True)
    none = torch.tensor([-1])
    return torch.empty_like(at).scatter_(
        0, by_cell, torch.cat([slot[order], none])[torch.where(fits, at, -1)]
    )


def check_slabs(subject: Subject, rank: int, due: Tensor, ledger: Ledger) -> None:
    """Counts, chunks, sources and height of a rank's slabs.

    Args:
        subject: the forward.
        rank: whose slabs.
        due: [world, L] routes of each rank to each slot.
        ledger: takes the findings.
    """
    traced = subject.stage(Stage.DISPATCH, rank)
    _check_counts(subject, rank, due, ledger)
    _check_chunks(subject, rank, ledger)
    _check_sources(subject, rank, ledger)
    height = traced["hidden_states"].shape[1]
    due_height = subject.layer.layout.ep * (subject.layer.capacity or 0)
    if height != due_height:
        detail = f"slabs of {height} rows, {due_height} are due"
        broken(ledger, Stage.DISPATCH, rank, "hidden_states", detail)
    scale = traced.get("hidden_states_scale")
    if scale is not None and scale.numel() and scale.stride(1) != 1:
        detail = f"scale strides {scale.stride()}; the rows of a slab are to be the fastest axis"
        broken(ledger, Stage.DISPATCH, rank, "hidden_states_scale", detail)


def _check_counts(subject: Subject, rank: int, due: Tensor, ledger: Ledger) -> None:
    """A chunk has a row for each route, a slab those of its chunks, and all are computed."""
    group, sent = subject.layer.layout.ep_group(rank), subject.stage(Stage.DISPATCH, rank)

    def of_chunk(got: int, want: int, place: Sequence[int]) -> str:
        return f"{got} rows from rank {group[place[1]]} for {want} routes"

    def of_slab(got: int, want: int, place: Sequence[int]) -> str:
        return f"masked_m is {got} for {want} received rows"

    for stage, name, counts, detail in (
        (Stage.DISPATCH, "handle.count", due[list(group)].T, of_chunk),
        (Stage.DISPATCH, "masked_m", sent["handle.count"].sum(1), of_slab),
        (Stage.PRE_PERMUTE, "rows.masked_m", sent["masked_m"], of_slab),
    ):
        check_counts(subject, rank, ledger, stage, name, counts, detail)


def _check_chunks(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Chunks that hold a row lie end to end from row 0 on, in whatever order of sources."""
    traced = subject.stage(Stage.DISPATCH, rank)
    for slot, expert in enumerate(subject.layer.local_experts(rank)):
        chunks = sorted(_chunks(traced, slot))
        end = 0
        for begin, count in chunks:
            if begin != end:
                detail = f"chunks (begin, rows) of expert {expert} leave a gap or overlap: {chunks}"
                broken(ledger, Stage.DISPATCH, rank, "handle.begin", detail)
                break
            end += count


def _chunks(traced: StageTensors, slot: int) -> Iterator[tuple[int, int]]:
    begins, counts = (traced[f"handle.{name}"][slot].tolist() for name in ("begin", "count"))
    yield from ((b, c) for b, c in zip(begins, counts, strict=True) if c)


def _check_sources(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Every row of a chunk names a row that its source has."""
    source, known = source_ranks(subject, rank), subject.received_from[rank] >= 0
    unknown = ((source >= 0) & ~known).nonzero()[:, 0].tolist()
    if unknown:
        slabs = subject.stage(Stage.DISPATCH, rank)["handle.source_row"]
        slot, row = divmod(unknown[0], slabs.shape[1])
        expert, other = subject.layer.local_experts(rank)[slot], int(source[unknown[0]])
        detail = (
            f"row {row} of expert {expert} comes from row {int(slabs[slot, row])} of rank {other}, "
            f"which does not exist; {len(unknown)} such rows"
        )
        broken(ledger, Stage.DISPATCH, rank, "handle.source_row", detail)

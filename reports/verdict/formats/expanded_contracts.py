"""Accounts and contracts of expanded rows: arrivals, buffer, segments, what the GEMM is told."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.formats.exchange import Arrival, report_arrival, routes_to_owner
from reports.verdict.formats.expanded_segments import ExpandedSegments, psum_due, rounded_up
from reports.verdict.formats.routes import check_counts, local_slots
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import broken
from reports.verdict.subject import Subject

ROWS = "rows.hidden_states"


def check_routes_arrived(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Account: each route has a row once, on the rank that owns its slot, and on no other."""
    ids = subject.layer_tensor(Stage.DISPATCH, "physical_ids")
    due = (local_slots(subject.layer, rank, ids) >= 0).to(torch.int64)
    received = (subject.received_from[rank] >= 0).nonzero()[:, 0]
    slot = subject.stage(Stage.DISPATCH, rank)["handle.source_slot"][received]
    cell = subject.received_from[rank][received] * subject.layer.top_k + slot
    got = torch.bincount(cell, minlength=due.numel()).view(due.shape)
    wrong = (got != due).nonzero()
    if wrong.numel():
        row, column = wrong[0].tolist()
        where = Arrival(
            rank=rank, tensor="handle.source_row", row=row, rows=len(wrong), slot=column
        )
        report_arrival(subject, ledger, where, int(got[row, column]), int(due[row, column]))


def check_expanded_rows(
    subject: Subject, rank: int, segments: ExpandedSegments, ledger: Ledger
) -> None:
    """The buffer has its fixed size, segments end where routes say, real rows have a source."""
    num_rows, due = len(segments.slot), buffer_rows(subject.layer)
    if num_rows != due:
        detail = f"a buffer of {num_rows} rows, {due} are due"
        broken(ledger, Stage.DISPATCH, rank, "hidden_states", detail)
    routes = routes_to_owner(subject, rank).sum(0)
    check_psum(subject, rank, routes, psum_due(routes, subject.layer.row_alignment), ledger)
    sourceless = ((segments.slot >= 0) & (subject.received_from[rank] < 0)).nonzero()[:, 0]
    if sourceless.numel():
        first, count = int(sourceless[0]), len(sourceless)
        detail = f"row {first} is counted and has no source; {count} such rows"
        broken(ledger, Stage.DISPATCH, rank, "handle.source_rank", detail)


def buffer_rows(layer: JudgedLayer) -> int:
    """Room for whatever the ranks may send, each segment aligned.

    Source: DeepEP, ElasticBuffer.dispatch without a CPU sync.
    """
    assert layer.capacity is not None, "deepep_v2 has buffers of a fixed size"
    routes = layer.layout.ep * layer.capacity * min(layer.top_k, layer.slots_per_rank)
    rows = routes + (layer.row_alignment - 1) * layer.slots_per_rank
    return int(rounded_up(torch.tensor(rows), layer.row_alignment))


def check_psum(subject: Subject, rank: int, routes: Tensor, due: Tensor, ledger: Ledger) -> None:
    """Contract: segments end where they should.

    Args:
        subject: the forward.
        rank: the receiver.
        routes: [L] routes that call for them.
        due: [L] ends that follow.
        ledger: takes the findings.
    """

    def detail(got: int, want: int, place: Sequence[int]) -> str:
        starts = f"start at multiples of {subject.layer.row_alignment}"
        return f"psum is {got}, due {want}: routes {routes.tolist()} in segments that {starts}"

    check_counts(subject, rank, ledger, Stage.DISPATCH, "psum", due, detail)


def check_masked_slabs(
    subject: Subject, rank: int, segments: ExpandedSegments, ledger: Ledger
) -> None:
    """Slabs hold what any expert may be sent, and count what psum counts."""
    traced, layer = subject.stage(Stage.PRE_PERMUTE, rank), subject.layer
    assert layer.capacity is not None, "deepep_v2 has buffers of a fixed size"
    height, due_height = traced[ROWS].shape[1], layer.layout.ep * layer.capacity
    if height != due_height:
        detail = f"slabs of {height} rows, {due_height} are due"
        broken(ledger, Stage.PRE_PERMUTE, rank, ROWS, detail)

    def of_slab(got: int, want: int, place: Sequence[int]) -> str:
        return f"masked_m is {got} for a segment of {want} rows"

    due = segments.count
    check_counts(subject, rank, ledger, Stage.PRE_PERMUTE, "rows.masked_m", due, of_slab)


def check_segments_in_place(
    subject: Subject, rank: int, segments: ExpandedSegments, ledger: Ledger
) -> None:
    """Every row of the buffer has the expert of its segment, padding included; others -1."""
    traced = subject.stage(Stage.PRE_PERMUTE, rank)
    m_indices, due = traced["rows.m_indices"], segments.padded_slot(subject.layer.row_alignment)
    if len(traced[ROWS]) != len(due):
        detail = f"{len(traced[ROWS])} grouped rows of a buffer of {len(due)}"
        broken(ledger, Stage.PRE_PERMUTE, rank, ROWS, detail)
    if not torch.equal(m_indices, due):
        wrong = "another length" if len(m_indices) != len(due) else "other experts"
        detail = f"{len(m_indices)} rows: {wrong} than segments at {segments.start.tolist()}"
        broken(ledger, Stage.PRE_PERMUTE, rank, "rows.m_indices", detail)

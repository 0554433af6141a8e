"""What deepep_normal promises: one row for each (token, rank), local ids, announced segments."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.band import fp32_noise, stored_bf16
from reports.verdict.formats.exchange import (
    check_arrivals_due,
    messages_due,
    partials_at_home,
    routes_to_owner,
)
from reports.verdict.formats.routes import check_output_index, local_slots
from reports.verdict.formats.token_rows import TOKEN_ROWS, TokenRowsView
from reports.verdict.formats.view import BF16_BYTES, FP32_BYTES, ID_BYTES, Axes, DueCall
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import BAND, CONTRACT, StageChecks, broken, check_moved
from reports.verdict.subject import Subject


class DeepEpNormalView(TokenRowsView):
    """See ``FormatView``."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {
            Stage.DISPATCH: {
                "physical_ids": ("T", "K"),
                "wire": ("T", "H"),
                "topk_ids": ("R", "K"),
                "topk_weights": ("R", "K"),
                "hidden_states": ("R", "H"),
                "handle.source_rank": ("R",),
                "handle.source_row": ("R",),
                "num_recv_tokens_per_expert": ("L",),
            },
            **TOKEN_ROWS,
        }
    )
    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {
            (Stage.DISPATCH, "topk_ids"): torch.int64,
            (Stage.DISPATCH, "topk_weights"): torch.float32,
            (Stage.PRE_PERMUTE, "rows.m_indices"): torch.int32,
            (Stage.PRE_PERMUTE, "restore.output_index"): torch.int64,
        }
    )

    quantised: Sequence[str] = ("wire", "hidden_states")

    def received_from(self, subject: Subject, rank: int) -> Tensor:
        """By the source rank and row that the handle names.

        Raises:
            UnreadableTraceError: a received row names no layer row of any rank.
        """
        traced = subject.stage(Stage.DISPATCH, rank)
        source, row = traced["handle.source_rank"], traced["handle.source_row"]
        rows = torch.tensor([len(tokens) for tokens in subject.layer_tokens])
        known = (source >= 0) & (source < len(rows))
        fits = known & (row >= 0) & (row < rows[source.clamp(0, len(rows) - 1)])
        if not bool(fits.all()):
            at = int((~fits).nonzero()[0])
            detail = f"received row {at} comes from row {int(row[at])} of rank {int(source[at])}"
            raise UnreadableTraceError(rank, Stage.DISPATCH, f"{detail}, which does not exist")
        return torch.tensor(subject.layer_starts)[source] + row

    def routes_due(self, subject: Subject, rank: int) -> Tensor:
        """A route is due on the rank that owns its slot, wherever its token is."""
        return routes_to_owner(subject, rank)

    def calls_due(self, subject: Subject, rank: int) -> Sequence[DueCall]:
        """Counts, then rows; on the way back one partial for every received row."""
        group = subject.layer.layout.ep_group(rank)
        returned = subject.stage(Stage.DISPATCH, rank)["topk_ids"].shape[0]
        counts = len(group) * (1 + subject.layer.slots_per_rank) * ID_BYTES
        rows = messages_due(subject, rank) * self._row_bytes(subject, rank)
        back = returned * subject.layer.hidden_size * BF16_BYTES
        return (
            DueCall(stage=Stage.DISPATCH, op="all_to_all_v", group=group, payload_bytes=counts),
            DueCall(stage=Stage.DISPATCH, op="all_to_all_v", group=group, payload_bytes=rows),
            DueCall(stage=Stage.COMBINE, op="all_to_all_v", group=group, payload_bytes=back),
        )

    def _row_bytes(self, subject: Subject, rank: int) -> int:
        """Data, scales, ids, weights and source row of one message."""
        traced = subject.stage(Stage.DISPATCH, rank)
        wire, scale = traced["wire"], traced.get("wire_scale")
        scales = 0 if scale is None else scale.shape[1] * scale.element_size()
        routes = subject.layer.top_k * (ID_BYTES + FP32_BYTES)
        return wire.shape[1] * wire.element_size() + scales + routes + ID_BYTES

    def check_arrivals(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Each row is dispatched to a rank once, and only if it has an expert there."""
        check_arrivals_due(subject, rank, "handle.source_row", ledger)

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Announced rows are the routes rounded up; segments are as announced, padding included."""
        counts = subject.stage(Stage.DISPATCH, rank)["num_recv_tokens_per_expert"]
        self._check_counts(subject, rank, counts, ledger)
        m_indices = subject.stage(Stage.PRE_PERMUTE, rank)["rows.m_indices"]
        due = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts.clamp_min(0))
        if m_indices.shape != due.shape or not torch.equal(m_indices, due):
            detail = f"{len(m_indices)} rows that are not the announced segments {counts.tolist()}"
            broken(ledger, Stage.PRE_PERMUTE, rank, "rows.m_indices", detail)
        check_output_index(subject, rank, ledger)

    def _check_counts(self, subject: Subject, rank: int, counts: Tensor, ledger: Ledger) -> None:
        alignment = subject.layer.row_alignment
        routes = torch.bincount(subject.routes[rank].local, minlength=len(counts))
        due = (routes + alignment - 1) // alignment * alignment
        for slot in (counts != due).nonzero()[:, 0].tolist():
            ledger.report(
                Deviation(
                    check=CONTRACT,
                    stage=Stage.DISPATCH,
                    rank=rank,
                    tensor="num_recv_tokens_per_expert",
                    expert=subject.layer.local_experts(rank)[slot],
                    got=float(counts[slot]),
                    want=float(due[slot]),
                    detail=f"{int(routes[slot])} routes announced as {int(counts[slot])} rows, "
                    f"due {int(due[slot])} (multiples of {alignment})",
                )
            )

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """What went on the wire by the quantiser rule; what arrived is what was sent."""
        sent = {"hidden_states": subject.layer_tensor(Stage.DISPATCH, "wire")}
        scale = subject.scale_of(subject.ranks, Stage.DISPATCH, "wire")
        if scale is not None:
            sent["hidden_states_scale"] = scale
        checks = StageChecks(ledger, Stage.DISPATCH, subject.layer, subject.layer_rows)
        x = subject.layer_tensor(Stage.GLUE_IN, "hidden_states")
        checks.quantised("wire", sent["hidden_states"], scale, x)
        physical = subject.layer_tensor(Stage.DISPATCH, "physical_ids")
        topk_weights = subject.layer_tensor(Stage.ROUTE, "topk_weights")
        for rank in subject.ranks:
            traced, source = subject.stage(Stage.DISPATCH, rank), subject.received_from[rank]
            rows = subject.received_rows(rank)
            arrived = StageChecks(ledger, Stage.DISPATCH, subject.layer, rows)
            check_moved(arrived, "hidden_states", traced, sent, source)
            ids = local_slots(subject.layer, rank, physical[source])
            weights = topk_weights[source].masked_fill(ids < 0, 0)
            ledger.moved(Stage.DISPATCH, "topk_ids", rows, got=traced["topk_ids"], want=ids)
            ledger.moved(
                Stage.DISPATCH, "topk_weights", rows, got=traced["topk_weights"], want=weights
            )

    def check_pre_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Every route's grouped row is the received row, codes and scales."""
        for rank in subject.ranks:
            placed = subject.placed[rank]
            traced = subject.stage(Stage.PRE_PERMUTE, rank)
            grouped = {
                name.removeprefix("rows."): take_rows(traced[name], placed.row)
                for name in ("rows.hidden_states", "rows.hidden_states_scale")
                if name in traced
            }
            checks = StageChecks(ledger, Stage.PRE_PERMUTE, subject.layer, placed.rows)
            sent = subject.stage(Stage.DISPATCH, rank)
            check_moved(checks, "hidden_states", grouped, sent, placed.received)
            self.check_restore(subject, rank, ledger)

    def check_combine(self, subject: Subject, ledger: Ledger) -> None:
        """Each row's partials of all ranks, added in fp32 and rounded once."""
        want, magnitude, count = partials_at_home(subject)
        noise = fp32_noise(magnitude, int(count.max()) if count.numel() else 0)
        ledger.cells(
            BAND,
            Stage.COMBINE,
            "routed",
            subject.layer_rows,
            got=subject.layer_tensor(Stage.COMBINE, "routed").to(torch.float64),
            want=want,
            band=stored_bf16(want, noise),
        )

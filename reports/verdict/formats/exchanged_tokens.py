"""Formats that send a token once to each rank of its experts, and bring one partial sum back."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from moe.trace import StageTensors
from reports.verdict.band import fp32_noise, stored_bf16
from reports.verdict.formats.exchange import (
    arrivals_due,
    check_arrivals_due,
    messages_due,
    partials_at_home,
    routes_to_owner,
)
from reports.verdict.formats.padding import check_padding
from reports.verdict.formats.routes import check_output_index, local_slots
from reports.verdict.formats.token_rows import TOKEN_ROWS, TokenRowsView
from reports.verdict.formats.view import BF16_BYTES, FP32_BYTES, ID_BYTES, Axes, DueCall
from reports.verdict.ledger import Ledger
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import BAND, StageChecks, broken, check_moved
from reports.verdict.subject import Subject

EXCHANGED_TOKENS: Final[Mapping[Stage, Mapping[str, Axes]]] = MappingProxyType(
    {
        Stage.DISPATCH: {
            "physical_ids": ("T", "K"),
            "wire": ("T", "H"),
            "topk_ids": ("R", "K"),
            "topk_weights": ("R", "K"),
            "hidden_states": ("R", "H"),
            "handle.source_rank": ("R",),
            "handle.source_row": ("R",),
        },
        **TOKEN_ROWS,
    }
)
"""What every such format leaves."""


class ExchangedTokensView(TokenRowsView):
    """See ``FormatView``: whose a received row is stands in the handle, by rank and row."""

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
        """By the source rank and row that the handle names; -1 for a dummy.

        Raises:
            UnreadableTraceError: a received row names no layer row of any rank.
        """
        traced = subject.stage(Stage.DISPATCH, rank)
        source, row = traced["handle.source_rank"], traced["handle.source_row"]
        place = layer_places(subject, source, row)
        senders = torch.tensor(self.dummy_senders(subject), dtype=source.dtype)
        is_dummy = torch.isin(source, senders) & (row == 0)
        expect_sources(subject, rank, (place >= 0) | is_dummy)
        return place

    def dummy_senders(self, subject: Subject) -> Sequence[int]:
        """Ranks that have no row and send one that belongs to no token."""
        return ()

    def dummies_due(self, subject: Subject, rank: int) -> int:
        """How many of those rows have to arrive at a rank."""
        return 0

    def messages_due(self, subject: Subject, rank: int) -> int:
        """Rows that a rank has to send."""
        return messages_due(subject, rank)

    def routes_due(self, subject: Subject, rank: int) -> Tensor:
        """A route is due on the rank that owns its slot, wherever its token is."""
        return routes_to_owner(subject, rank)

    def calls_due(self, subject: Subject, rank: int) -> Sequence[DueCall]:
        """Counts, then rows; on the way back one partial for every row that is due here."""
        returned = int(arrivals_due(subject, rank).sum()) + self.dummies_due(subject, rank)
        return exchange_calls(subject, rank, self.messages_due(subject, rank), returned)

    def check_arrivals(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Each row is dispatched to a rank once, and only if it has an expert there."""
        check_arrivals_due(subject, rank, "handle.source_row", ledger)

    def check_segments(self, subject: Subject, rank: int, lengths: Tensor, ledger: Ledger) -> None:
        """Contract: segments of [L] announced lengths, padding with its expert's id included."""
        m_indices = subject.stage(Stage.PRE_PERMUTE, rank)["rows.m_indices"]
        due = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths.clamp_min(0))
        if m_indices.shape != due.shape or not torch.equal(m_indices, due):
            detail = f"{len(m_indices)} rows that are not the announced segments {lengths.tolist()}"
            broken(ledger, Stage.PRE_PERMUTE, rank, "rows.m_indices", detail)
        check_padding(subject, rank, ledger, zeroes=subject.layer.zeroes_padding)
        check_output_index(subject, rank, ledger)

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """What went on the wire by the quantiser rule; what arrived is what was sent."""
        sent = check_wire(subject, ledger)
        physical = subject.layer_tensor(Stage.DISPATCH, "physical_ids")
        topk_weights = subject.layer_tensor(Stage.ROUTE, "topk_weights")
        for rank in subject.ranks:
            at = (subject.received_from[rank] >= 0).nonzero()[:, 0]
            traced, source = self.received(subject, rank, at), subject.received_from[rank][at]
            rows = subject.received_rows(rank)[at]
            arrived = StageChecks(ledger, Stage.DISPATCH, subject.layer, rows)
            check_moved(arrived, "hidden_states", traced, sent, source)
            ids = local_slots(subject.layer, rank, physical[source])
            weights = topk_weights[source].masked_fill(ids < 0, 0)
            ledger.moved(Stage.DISPATCH, "topk_ids", rows, got=traced["topk_ids"], want=ids)
            ledger.moved(
                Stage.DISPATCH, "topk_weights", rows, got=traced["topk_weights"], want=weights
            )

    def received(self, subject: Subject, rank: int, at: Tensor) -> Mapping[str, Tensor]:
        """Tensors of the received rows ``at``, by name."""
        traced = subject.stage(Stage.DISPATCH, rank)
        names = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")
        return {name: take_rows(traced[name], at) for name in names if name in traced}

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
            self.check_grouped(checks, grouped, sent, placed.received)
            self.check_restore(subject, rank, ledger)

    def check_grouped(
        self, checks: StageChecks, grouped: StageTensors, sent: StageTensors, received: Tensor
    ) -> None:
        """Grouped rows of routes are the received rows as they came."""
        check_moved(checks, "hidden_states", grouped, sent, received)

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


def layer_places(subject: Subject, source_rank: Tensor, source_row: Tensor) -> Tensor:
    """[N] int64: place among ``layer_rows`` of rows named by rank and row; -1 for no such row."""
    rows = torch.tensor([len(tokens) for tokens in subject.layer_tokens])
    known = (source_rank >= 0) & (source_rank < len(rows))
    rank = source_rank.clamp(0, len(rows) - 1)
    exists = known & (source_row >= 0) & (source_row < rows[rank])
    return torch.where(exists, torch.tensor(subject.layer_starts)[rank] + source_row, -1)


def expect_sources(subject: Subject, rank: int, is_known: Tensor) -> None:
    """Raise unless the handle's source of every received row [R] is known.

    Raises:
        UnreadableTraceError: the first one that is not.
    """
    unknown = (~is_known).nonzero()[:, 0]
    if unknown.numel():
        at, traced = int(unknown[0]), subject.stage(Stage.DISPATCH, rank)
        names = ("row", "slot", "rank")
        source = {
            n: int(traced[f"handle.source_{n}"][at])
            for n in names
            if f"handle.source_{n}" in traced
        }
        named = " of ".join(f"{name} {value}" for name, value in source.items())
        detail = f"received row {at} comes from {named}, which does not exist"
        raise UnreadableTraceError(rank, Stage.DISPATCH, detail)


def exchange_calls(subject: Subject, rank: int, sent: int, returned: int) -> Sequence[DueCall]:
    """Counts, then ``sent`` rows; on the way back one bf16 row for each of ``returned``."""
    group = subject.layer.layout.ep_group(rank)
    payloads = (
        (Stage.DISPATCH, len(group) * (1 + subject.layer.slots_per_rank) * ID_BYTES),
        (Stage.DISPATCH, sent * message_bytes(subject, rank)),
        (Stage.COMBINE, returned * subject.layer.hidden_size * BF16_BYTES),
    )
    return [
        DueCall(stage=stage, op="all_to_all_v", group=group, payload_bytes=payload)
        for stage, payload in payloads
    ]


def check_wire(subject: Subject, ledger: Ledger) -> Mapping[str, Tensor]:
    """What went on the wire by the quantiser rule, or bit for bit where the view says so.

    Returns:
        Codes and scales of all layer rows, by the names that they have where they arrive.
    """
    sent = {"hidden_states": subject.layer_tensor(Stage.DISPATCH, "wire")}
    scale = subject.scale_of(subject.ranks, Stage.DISPATCH, "wire")
    if scale is not None:
        sent["hidden_states_scale"] = scale
    checks = StageChecks(ledger, Stage.DISPATCH, subject.layer, subject.layer_rows)
    x = subject.layer_tensor(Stage.GLUE_IN, "hidden_states")
    if "wire" in subject.view.quantised:
        checks.quantised("wire", sent["hidden_states"], scale, x)
    else:
        ledger.moved(checks.stage, "wire", checks.rows, got=sent["hidden_states"], want=x)
    return sent


def message_bytes(subject: Subject, rank: int) -> int:
    """Data, scales, ids, weights and source row of one token on the wire."""
    traced = subject.stage(Stage.DISPATCH, rank)
    wire, scale = traced["wire"], traced.get("wire_scale")
    scales = 0 if scale is None else scale.shape[1] * scale.element_size()
    routes = subject.layer.top_k * (ID_BYTES + FP32_BYTES)
    return wire.shape[1] * wire.element_size() + scales + routes + ID_BYTES

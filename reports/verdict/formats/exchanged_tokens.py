"""Formats that send a token once to each rank of its experts, and bring one partial sum back."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.captured import CapturedTensors, where_captured
from reports.verdict.formats.exchange import (
    arrivals_due,
    check_arrivals_due,
    check_partials_combined,
    exchange_calls,
    messages_due,
)
from reports.verdict.formats.grouped_rows import check_copied
from reports.verdict.formats.padding import check_padding
from reports.verdict.formats.routes import check_output_index, local_slots
from reports.verdict.formats.token_rows import TOKEN_ROWS, TokenRowsView
from reports.verdict.formats.view import BF16_BYTES, FP32_BYTES, ID_BYTES, Axes, DueCall
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.rows import take_rows
from reports.verdict.rules import QUANTISER
from reports.verdict.stage_checks import StageChecks, broken, check_moved
from reports.verdict.subject import Subject

EXCHANGED_TOKENS: Final[Mapping[Stage, Mapping[str, Axes]]] = MappingProxyType(
    {
        Stage.DISPATCH: {
            "physical_ids": ("T", "K"),
            "wire": ("T", "D"),
            "topk_ids": ("R", "K"),
            "topk_weights": ("R", "K"),
            "hidden_states": ("R", "D"),
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

    def calls_due(self, subject: Subject, rank: int) -> Sequence[DueCall]:
        """Counts, then rows; on the way back one partial for every row that is due here."""
        returned = int(arrivals_due(subject, rank).sum()) + self.dummies_due(subject, rank)
        return token_calls(subject, rank, self.messages_due(subject, rank), returned)

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
        with where_captured(ledger, "dispatch/wire", QUANTISER, MOVES):
            check_wire(subject, ledger)
        for rank in subject.ranks:
            with where_captured(ledger, "dispatch/hidden_states", MOVES):
                self._check_arrived(subject, rank, ledger)
            with where_captured(ledger, "dispatch/topk_ids", MOVES):
                self._check_routes_sent(subject, rank, ledger)

    def _check_arrived(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Received rows are those that their sources put on the wire."""
        sent = wire_of(subject)
        at = (subject.received_from[rank] >= 0).nonzero()[:, 0]
        arrived = StageChecks(
            ledger, Stage.DISPATCH, subject.layer, subject.received_rows(rank)[at]
        )
        source = subject.received_from[rank][at]
        check_moved(arrived, "hidden_states", self.received(subject, rank, at), sent, source)

    def _check_routes_sent(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Ids and weights of received rows are those of their sources' routes to this rank."""
        at = (subject.received_from[rank] >= 0).nonzero()[:, 0]
        traced, source = self.received(subject, rank, at), subject.received_from[rank][at]
        rows = subject.received_rows(rank)[at]
        physical = subject.layer_tensor(Stage.DISPATCH, "physical_ids")
        ids = local_slots(subject.layer, rank, physical[source])
        ledger.moved(Stage.DISPATCH, "topk_ids", rows, got=traced["topk_ids"], want=ids)
        with where_captured(ledger, "dispatch/topk_weights", MOVES):
            topk_weights = subject.layer_tensor(Stage.ROUTE, "topk_weights")
            weights = topk_weights[source].masked_fill(ids < 0, 0)
            got = traced["topk_weights"]
            ledger.moved(Stage.DISPATCH, "topk_weights", rows, got=got, want=weights)

    def received(self, subject: Subject, rank: int, at: Tensor) -> Mapping[str, Tensor]:
        """Tensors of the received rows ``at``, by name."""
        traced = subject.stage(Stage.DISPATCH, rank)
        names = ("hidden_states", "hidden_states_scale", "topk_ids", "topk_weights")
        rows = {name: take_rows(traced[name], at) for name in names if name in traced}
        return CapturedTensors(Stage.DISPATCH, rows)

    def check_pre_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Every route's grouped row comes from the received row; the way back is as dispatched."""
        for rank in subject.ranks:
            self.check_grouped(subject, rank, ledger)
            self.check_restore(subject, rank, ledger)

    def check_grouped(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Grouped rows of routes are the received rows as they came."""
        check_copied(subject, rank, ledger)

    def check_combine(self, subject: Subject, ledger: Ledger) -> None:
        """Each row's partials of all ranks, added in fp32 and rounded once."""
        check_partials_combined(subject, ledger)


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


def token_calls(subject: Subject, rank: int, sent: int, returned: int) -> Sequence[DueCall]:
    """Counts, then ``sent`` rows; on the way back one bf16 row for each of ``returned``."""
    layer = subject.layer
    return exchange_calls(
        subject,
        rank,
        counts=layer.layout.ep * (1 + layer.slots_per_rank) * ID_BYTES,
        rows=sent * message_bytes(subject, rank),
        returned=returned * layer.expert_hidden_size * BF16_BYTES,
    )


def wire_of(subject: Subject) -> Mapping[str, Tensor]:
    """Codes and scales of all layer rows, by the names that they have where they arrive."""
    sent = {"hidden_states": subject.layer_tensor(Stage.DISPATCH, "wire")}
    scale = subject.scale_of(subject.ranks, Stage.DISPATCH, "wire")
    return sent if scale is None else {**sent, "hidden_states_scale": scale}


def check_wire(subject: Subject, ledger: Ledger) -> Mapping[str, Tensor]:
    """What went on the wire by the quantiser rule, or bit for bit where the view says so.

    Returns:
        See ``wire_of``.
    """
    sent = wire_of(subject)
    checks = StageChecks(ledger, Stage.DISPATCH, subject.layer, subject.layer_rows)
    x = subject.dispatched_rows(subject.ranks)
    if "wire" in subject.view.quantised:
        checks.quantised("wire", sent["hidden_states"], sent.get("hidden_states_scale"), x)
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

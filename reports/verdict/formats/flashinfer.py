"""What ``flashinfer`` promises: in decode one row for each (token, rank), in prefill all rows.

EP spans all ranks, so that ranks of the handle are ranks of the world.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import Phase, Stage
from reports.verdict.deviation import Deviation
from reports.verdict.formats.exchange import (
    arrivals_due,
    check_arrivals_due,
    check_partials_combined,
    exchange_calls,
    messages_due,
)
from reports.verdict.formats.grouped_tokens import GROUPED_TOKENS, GroupedTokensView
from reports.verdict.formats.routes import local_slots, owner_of_slot
from reports.verdict.formats.token_rows import TOKEN_ROWS
from reports.verdict.formats.view import BF16_BYTES, FP32_BYTES, ID_BYTES, Axes, DueCall
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.stage_checks import ACCOUNTS, broken
from reports.verdict.subject import Subject

INT32_BYTES: Final = 4
SENT_TO: Final = "handle.target_rank"
SENT_AS: Final = "handle.send_index"
COUNTS: Final = "handle.counts"

_RECEIVED: Final[Mapping[str, Axes]] = MappingProxyType(
    {
        "physical_ids": ("T", "K"),
        "hidden_states": ("R", "D"),
        "topk_ids": ("R", "K"),
        "topk_weights": ("R", "K"),
        COUNTS: ("P",),
    }
)


class _FlashInferView(GroupedTokensView, ABC):
    """What both forms share; see ``FormatView``."""

    @abstractmethod
    def counts_due(self, subject: Subject, rank: int) -> Tensor:
        """[P] int64: rows that a rank receives from each."""

    @abstractmethod
    def ids_due(self, subject: Subject, rank: int, physical_ids: Tensor) -> Tensor:
        """[N, K] int64: received ids of rows with these physical ids."""

    def check_arrivals(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """As many rows from each rank as it has for this one."""
        counts = subject.stage(Stage.DISPATCH, rank)[COUNTS]
        due = self.counts_due(subject, rank)
        for source in (counts != due).nonzero()[:1, 0].tolist():
            got, want = int(counts[source]), int(due[source])
            ledger.report(
                Deviation(
                    check=ACCOUNTS,
                    stage=Stage.DISPATCH,
                    rank=rank,
                    tensor=COUNTS,
                    got=float(got),
                    want=float(want),
                    detail=f"{got} rows from rank {source}, due {want}",
                )
            )

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """Rows, ids and weights are those of their source; a row of none has no ids."""
        hidden_states = subject.dispatched_rows(subject.ranks)
        physical = subject.layer_tensor(Stage.DISPATCH, "physical_ids")
        topk_weights = subject.layer_tensor(Stage.ROUTE, "topk_weights")
        for rank in subject.ranks:
            traced, rows = subject.stage(Stage.DISPATCH, rank), subject.received_rows(rank)
            source = subject.received_from[rank]
            ids = torch.full(traced["topk_ids"].shape, -1, dtype=torch.int64)
            real = source >= 0
            ids[real] = self.ids_due(subject, rank, physical[source[real]])
            ids = ids.to(torch.int32)
            ledger.moved(Stage.DISPATCH, "topk_ids", rows, got=traced["topk_ids"], want=ids)
            for name, sent in (("hidden_states", hidden_states), ("topk_weights", topk_weights)):
                got, want = traced[name][real], sent[source[real]]
                ledger.moved(Stage.DISPATCH, name, rows[real], got=got, want=want)

    def check_combine(self, subject: Subject, ledger: Ledger) -> None:
        """Each row's partials, one a rank, added in fp32 in any order and rounded once."""
        check_partials_combined(subject, ledger)


class FlashInferDecodeView(_FlashInferView):
    """See ``FormatView``: room for M rows from each rank, ids as all ranks count them."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {
            Stage.DISPATCH: {**_RECEIVED, SENT_TO: ("T", "K"), SENT_AS: ("T", "K")},
            **TOKEN_ROWS,
        }
    )
    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {
            **GROUPED_TOKENS,
            (Stage.DISPATCH, SENT_TO): torch.int32,
            (Stage.DISPATCH, SENT_AS): torch.int32,
        }
    )

    def id_limits(self, subject: Subject) -> Mapping[str, int]:
        """Ids of received rows are slots over all ranks."""
        return {"topk_ids": len(subject.layer.slot_experts)}

    def local_ids(self, subject: Subject, rank: int) -> Tensor:
        """This rank's among the received slots."""
        ids = subject.stage(Stage.DISPATCH, rank)["topk_ids"]
        return local_slots(subject.layer, rank, ids)

    def received_from(self, subject: Subject, rank: int) -> Tensor:
        """By what each rank says it wrote here, and into which row.

        Raises:
            UnreadableTraceError: there is not room for M rows from each rank, or a rank wrote to a
                row that does not exist.
        """
        height = max(map(len, subject.layer_tokens))
        received = torch.full((subject.layer.world_size * height,), -1)
        rows = len(subject.stage(Stage.DISPATCH, rank)["topk_ids"])
        if rows != len(received):
            detail = f"{rows} received rows; {height} from each rank are {len(received)}"
            raise UnreadableTraceError(rank, Stage.DISPATCH, detail)
        to_rank = subject.layer_tensor(Stage.DISPATCH, SENT_TO) == subject.layer.ep_rank(rank)
        place, slot = to_rank.nonzero(as_tuple=True)
        index = subject.layer_tensor(Stage.DISPATCH, SENT_AS)[place, slot].to(torch.int64)
        sender = subject.layer_rows.rank[place]
        outside = ((index < 0) | (index >= height)).nonzero()[:, 0]
        if outside.numel():
            detail = f"wrote to row {int(index[outside[0]])} of {height} on rank {rank}"
            raise UnreadableTraceError(int(sender[outside[0]]), Stage.DISPATCH, detail)
        received[sender * height + index] = place
        return received

    def counts_due(self, subject: Subject, rank: int) -> Tensor:
        """Those of its rows that have an expert there."""
        source = subject.layer_rows.rank[arrivals_due(subject, rank) > 0]
        return torch.bincount(source, minlength=subject.layer.world_size)

    def ids_due(self, subject: Subject, rank: int, physical_ids: Tensor) -> Tensor:
        """All of them, those of other ranks' experts, too."""
        return physical_ids.to(torch.int64)

    def check_arrivals(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Each row is dispatched to a rank once, and only if it has an expert there."""
        super().check_arrivals(subject, rank, ledger)
        check_arrivals_due(subject, rank, SENT_AS, ledger)

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """A rank writes its rows to another one without a gap; then the grouped rows."""
        counts = subject.stage(Stage.DISPATCH, rank)[COUNTS]
        is_written = (subject.received_from[rank] >= 0).view(len(counts), -1)
        wrong = is_written != (torch.arange(is_written.shape[1]) < counts[:, None])
        for source in wrong.any(dim=1).nonzero()[:1, 0].tolist():
            written = is_written[source].nonzero()[:, 0].tolist()
            detail = f"rank {source} wrote rows {written}; the first {int(counts[source])} are due"
            broken(ledger, Stage.DISPATCH, rank, SENT_AS, detail)
        super().check_groups(subject, rank, ledger)

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """A message a destination, at the slot of its first expert; then what arrived."""
        target = subject.layer_tensor(Stage.DISPATCH, SENT_TO)
        owner = owner_of_slot(subject.layer, subject.layer_tensor(Stage.DISPATCH, "physical_ids"))
        due = owner.clone()
        for slot in range(1, owner.shape[1]):
            is_repeat = (owner[:, :slot] == owner[:, slot, None]).any(dim=1)
            due[is_repeat, slot] = -1
        due = due.to(torch.int32)
        ledger.moved(Stage.DISPATCH, SENT_TO, subject.layer_rows, got=target, want=due)
        has_index = subject.layer_tensor(Stage.DISPATCH, SENT_AS) >= 0
        want = due >= 0
        ledger.moved(Stage.DISPATCH, SENT_AS, subject.layer_rows, got=has_index, want=want)
        super().check_dispatch(subject, ledger)

    def calls_due(self, subject: Subject, rank: int) -> Sequence[DueCall]:
        """Counts, then rows with ids and weights; on the way back one partial for each arrival."""
        layer = subject.layer
        row = layer.expert_hidden_size * BF16_BYTES
        message = row + layer.top_k * (INT32_BYTES + FP32_BYTES)
        return exchange_calls(
            subject,
            rank,
            counts=layer.layout.ep * ID_BYTES,
            rows=messages_due(subject, rank) * message,
            returned=int(arrivals_due(subject, rank).sum()) * row,
        )


class FlashInferExtendView(_FlashInferView):
    """See ``FormatView``: all ranks' rows on each of them, ids made local."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {Stage.DISPATCH: _RECEIVED, **TOKEN_ROWS}
    )

    def received_from(self, subject: Subject, rank: int) -> Tensor:
        """All layer rows, in their order.

        Raises:
            UnreadableTraceError: it received fewer, or more.
        """
        rows = len(subject.stage(Stage.DISPATCH, rank)["topk_ids"])
        if rows != len(subject.layer_rows):
            detail = f"{rows} received rows of {len(subject.layer_rows)}"
            raise UnreadableTraceError(rank, Stage.DISPATCH, detail)
        return torch.arange(rows)

    def counts_due(self, subject: Subject, rank: int) -> Tensor:
        """All that each rank has."""
        return torch.tensor([len(tokens) for tokens in subject.layer_tokens])

    def ids_due(self, subject: Subject, rank: int, physical_ids: Tensor) -> Tensor:
        """This rank's slots as it counts them."""
        return local_slots(subject.layer, rank, physical_ids)

    def calls_due(self, subject: Subject, rank: int) -> Sequence[DueCall]:
        """Rows, ids and weights gathered; partial sums of all rows scattered."""
        layer, group = subject.layer, subject.layer.layout.ep_group(rank)
        own, all_rows = len(subject.layer_tokens[rank]), len(subject.layer_rows)
        gathered = (
            layer.expert_hidden_size * BF16_BYTES,
            layer.top_k * INT32_BYTES,
            layer.top_k * FP32_BYTES,
        )
        calls = [(Stage.DISPATCH, "all_gather_v", own * width) for width in gathered]
        calls.append((Stage.COMBINE, "reduce_scatter_v", all_rows * gathered[0]))
        return tuple(
            DueCall(stage=stage, op=op, group=group, payload_bytes=payload)
            for stage, op, payload in calls
        )


def flashinfer_view(layer: JudgedLayer) -> FlashInferDecodeView | FlashInferExtendView:
    """The form that the phase has."""
    assert layer.layout.ep == layer.world_size, "flashinfer spans all ranks by EP"
    return FlashInferExtendView() if layer.phase is Phase.EXTEND else FlashInferDecodeView()

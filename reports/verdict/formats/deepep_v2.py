"""What deepep_v2 promises without expansion: rows as deepep_normal has them, and ends of segments.

A rank without tokens sends a dummy: one zero row with zero weights, for the first K slots of all.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import GemmLayout, Stage
from reports.verdict.deviation import Deviation
from reports.verdict.formats.deepep_v2_expanded import (
    DeepEpV2ExpandedContigView,
    DeepEpV2ExpandedView,
)
from reports.verdict.formats.exchange import routes_to_owner
from reports.verdict.formats.exchanged_tokens import EXCHANGED_TOKENS, ExchangedTokensView
from reports.verdict.formats.expanded_contracts import check_psum
from reports.verdict.formats.expanded_segments import rounded_up
from reports.verdict.formats.routes import local_slots, owner_of_slot
from reports.verdict.formats.view import Axes, FormatView
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import ACCOUNTS, StageChecks
from reports.verdict.subject import Subject


class DeepEpV2View(ExchangedTokensView):
    """See ``FormatView``."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {
            **EXCHANGED_TOKENS,
            Stage.DISPATCH: {**EXCHANGED_TOKENS[Stage.DISPATCH], "psum": ("L",)},
        }
    )
    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {**ExchangedTokensView.stored_as, (Stage.DISPATCH, "psum"): torch.int32}
    )

    def dummy_senders(self, subject: Subject) -> Sequence[int]:
        """Ranks without rows."""
        return [rank for rank in subject.ranks if not len(subject.layer_tokens[rank])]

    def dummies_due(self, subject: Subject, rank: int) -> int:
        """One of each sender, where any of the first K slots is."""
        is_asked = bool((_dummy_slots(subject, rank) >= 0).any())
        return len(self.dummy_senders(subject)) if is_asked else 0

    def messages_due(self, subject: Subject, rank: int) -> int:
        """A dummy goes to every rank that holds one of the first K slots."""
        if rank in self.dummy_senders(subject):
            first_slots = torch.arange(subject.layer.top_k)
            return len(torch.unique(owner_of_slot(subject.layer, first_slots)))
        return super().messages_due(subject, rank)

    def check_arrivals(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Each row, and each dummy, is dispatched to a rank once if it has an expert there."""
        super().check_arrivals(subject, rank, ledger)
        senders = self.dummy_senders(subject)
        due = 1 if self.dummies_due(subject, rank) else 0
        source = subject.stage(Stage.DISPATCH, rank)["handle.source_rank"]
        for sender in senders:
            got = int((source == sender).sum())
            if got != due:
                ledger.report(
                    Deviation(
                        check=ACCOUNTS,
                        stage=Stage.DISPATCH,
                        rank=rank,
                        tensor="handle.source_rank",
                        got=float(got),
                        want=float(due),
                        detail=f"the dummy of rank {sender}, which is idle, arrived {got} times, "
                        f"due {due}",
                    )
                )

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Segments end where all routes, dummies' among them, say; and lie as announced."""
        psum = subject.stage(Stage.DISPATCH, rank)["psum"].to(torch.int64)
        self._check_psum(subject, rank, ledger)
        self.check_segments(subject, rank, psum.diff(prepend=psum.new_zeros(1)), ledger)

    def _check_psum(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        of_dummies = _dummy_slots(subject, rank)
        routes = routes_to_owner(subject, rank).sum(0)
        routes[of_dummies[of_dummies >= 0]] += len(self.dummy_senders(subject))
        due = rounded_up(routes, subject.layer.row_alignment).cumsum(0)
        check_psum(subject, rank, routes, due, ledger)

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """As the base; dummies are zero."""
        super().check_dispatch(subject, ledger)
        for rank in subject.ranks:
            self._check_dummies(subject, rank, ledger)

    def _check_dummies(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """A zero row by the quantiser rule, zero weights, and the ids of the first K slots."""
        at = (subject.received_from[rank] < 0).nonzero()[:, 0]
        traced, rows = self.received(subject, rank, at), subject.received_rows(rank)[at]
        checks = StageChecks(ledger, Stage.DISPATCH, subject.layer, rows)
        zeros = torch.zeros(len(at), subject.layer.expert_hidden_size, dtype=torch.bfloat16)
        scale = traced.get("hidden_states_scale")
        checks.quantised("hidden_states", traced["hidden_states"], scale, zeros)
        ids = _dummy_slots(subject, rank).expand(len(at), -1)
        weights = torch.zeros(ids.shape)
        ledger.moved(Stage.DISPATCH, "topk_ids", rows, got=traced["topk_ids"], want=ids)
        ledger.moved(Stage.DISPATCH, "topk_weights", rows, got=traced["topk_weights"], want=weights)


def _dummy_slots(subject: Subject, rank: int) -> Tensor:
    """[K] int64: the first K slots of all as a rank counts its own, -1 for those of others."""
    return local_slots(subject.layer, rank, torch.arange(subject.layer.top_k))


def deepep_v2_view(layer: JudgedLayer) -> FormatView:
    """Rows of tokens, or of routes: in slabs, or where they are."""
    if not layer.expanded:
        return DeepEpV2View()
    in_slabs = layer.gemm_layout is GemmLayout.MASKED
    return DeepEpV2ExpandedView() if in_slabs else DeepEpV2ExpandedContigView()

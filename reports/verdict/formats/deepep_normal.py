"""What deepep_normal promises: one row for each (token, rank), local ids, announced segments."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.formats.exchanged_tokens import EXCHANGED_TOKENS, ExchangedTokensView
from reports.verdict.formats.view import Axes
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.stage_checks import CONTRACT
from reports.verdict.subject import Subject


class DeepEpNormalView(ExchangedTokensView):
    """See ``FormatView``."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {
            **EXCHANGED_TOKENS,
            Stage.DISPATCH: {
                **EXCHANGED_TOKENS[Stage.DISPATCH],
                "num_recv_tokens_per_expert": ("L",),
            },
        }
    )

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Announced rows are the routes rounded up; segments are as announced, padding included."""
        counts = subject.stage(Stage.DISPATCH, rank)["num_recv_tokens_per_expert"]
        self._check_counts(subject, rank, counts, ledger)
        self.check_segments(subject, rank, counts, ledger)

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

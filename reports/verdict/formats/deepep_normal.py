"""What deepep_normal promises: one row for each (token, rank), local ids, announced segments.

Its wire has what the recipe quantises, or bf16 that pre-permute quantises.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from moe.formats import ScaleFormat, Stage
from reports.verdict.formats.exchanged_tokens import EXCHANGED_TOKENS, ExchangedTokensView
from reports.verdict.formats.expanded_segments import rounded_up
from reports.verdict.formats.grouped_rows import check_quantised
from reports.verdict.formats.routes import check_counts
from reports.verdict.formats.view import Axes, FormatView
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
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
        self._check_announced(subject, rank, ledger)
        self.check_segments(subject, rank, counts, ledger)

    def _check_announced(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        layer = subject.layer
        routes = torch.bincount(subject.routes[rank].local, minlength=layer.slots_per_rank)
        due = rounded_up(routes, layer.row_alignment)

        def detail(got: int, want: int, place: Sequence[int]) -> str:
            announced = f"{int(routes[place[0]])} routes announced as {got} rows"
            return f"{announced}, due {want} (multiples of {layer.row_alignment})"

        name = "num_recv_tokens_per_expert"
        check_counts(subject, rank, ledger, Stage.DISPATCH, name, due, detail)


class DeepEpNormalBf16WireView(DeepEpNormalView):
    """The same with bf16 on the wire, whatever the recipe: pre-permute quantises."""

    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {
            **DeepEpNormalView.stored_as,
            (Stage.DISPATCH, "wire"): torch.bfloat16,
            (Stage.DISPATCH, "hidden_states"): torch.bfloat16,
        }
    )
    quantised: Sequence[str] = ()

    def check_grouped(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Grouped rows of routes are the received rows by the recipe's quantiser; bf16: copies."""
        check_quantised(subject, rank, ledger)


def deepep_normal_view(layer: JudgedLayer) -> FormatView:
    """The view of the layer's wire."""
    is_bf16 = layer.bf16_wire or layer.scale_format is ScaleFormat.NONE
    return DeepEpNormalBf16WireView() if is_bf16 else DeepEpNormalView()

"""The two wires of the low-latency formats: codes, or bf16 that is quantised on arrival."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import ScaleFormat, Stage
from reports.verdict.formats.low_latency import LowLatencyView
from reports.verdict.formats.view import BF16_BYTES, FormatView
from reports.verdict.layer import JudgedLayer
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import StageChecks
from reports.verdict.subject import Subject


def low_latency_view(layer: JudgedLayer) -> FormatView:
    """The view of the layer's wire."""
    is_bf16 = layer.bf16_wire or layer.scale_format is ScaleFormat.NONE
    return LowLatencyBf16WireView() if is_bf16 else LowLatencyView()


class LowLatencyBf16WireView(LowLatencyView):
    """The same with bf16 on the wire: what a recipe quantises, pre-permute does."""

    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {**LowLatencyView.stored_as, (Stage.DISPATCH, "hidden_states"): torch.bfloat16}
    )
    quantised: Sequence[str] = ()
    low_latency_wire = False

    def _data_bytes(self, subject: Subject) -> int:
        return subject.layer.hidden_size * BF16_BYTES

    def _check_wire(
        self, checks: StageChecks, values: Tensor, scale: Tensor | None, x: Tensor, source: Tensor
    ) -> None:
        """Rows [N, H] are ``x[source]``, bit for bit."""
        checks.ledger.moved(checks.stage, "hidden_states", checks.rows, got=values, want=x[source])

    def _check_grouped(self, subject: Subject, rank: int, checks: StageChecks) -> None:
        """The grouped rows of routes are the received ones, by the recipe's usual quantiser."""
        row, name = subject.placed[rank].row, "rows.hidden_states"
        scale = None
        if f"{name}_scale" in subject.stage(Stage.PRE_PERMUTE, rank):
            scale = take_rows(subject.grouped(Stage.PRE_PERMUTE, rank, f"{name}_scale"), row)
        values = take_rows(subject.grouped(Stage.PRE_PERMUTE, rank, name), row)
        source = take_rows(subject.grouped(Stage.DISPATCH, rank, "hidden_states"), row)
        checks.quantised(name, values, scale, source)

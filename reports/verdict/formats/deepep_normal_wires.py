"""The two wires of deepep_normal: what the recipe quantises, or bf16 that pre-permute quantises."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import ScaleFormat, Stage
from moe.trace import StageTensors
from reports.verdict.formats.deepep_normal import DeepEpNormalView
from reports.verdict.formats.view import FormatView
from reports.verdict.layer import JudgedLayer
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import StageChecks


def deepep_normal_view(layer: JudgedLayer) -> FormatView:
    """The view of the layer's wire."""
    is_bf16 = layer.bf16_wire or layer.scale_format is ScaleFormat.NONE
    return DeepEpNormalBf16WireView() if is_bf16 else DeepEpNormalView()


class DeepEpNormalBf16WireView(DeepEpNormalView):
    """The same with bf16 on the wire, whatever the recipe."""

    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {
            **DeepEpNormalView.stored_as,
            (Stage.DISPATCH, "wire"): torch.bfloat16,
            (Stage.DISPATCH, "hidden_states"): torch.bfloat16,
        }
    )
    quantised: Sequence[str] = ()

    def check_grouped(
        self, checks: StageChecks, grouped: StageTensors, sent: StageTensors, received: Tensor
    ) -> None:
        """Grouped rows of routes are the received rows by the recipe's quantiser; bf16: copies."""
        checks.quantised(
            "rows.hidden_states",
            grouped["hidden_states"],
            grouped.get("hidden_states_scale"),
            take_rows(sent["hidden_states"], received),
        )

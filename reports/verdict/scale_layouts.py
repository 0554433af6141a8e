"""Lays scales out as a layer's GEMMs read them, for traces whose files keep rows alone."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moe.formats import ScaleFormat, Stage
from moe.trace import RankTrace
from reports.verdict.layer import JudgedLayer
from reports.verdict.scale_contracts import TMA_ALIGNED_WORDS, lies_in_columns


def in_due_layout(layer: JudgedLayer, trace: RankTrace) -> RankTrace:
    """The same values, with the strides that are due; nothing is known of those they had."""
    stages = {stage: _laid_out(layer, stage, named) for stage, named in trace.stages.items()}
    return RankTrace(rank=trace.rank, stages=stages, has_strides=False)


def _laid_out(
    layer: JudgedLayer, stage: Stage, named: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    return {
        name: _in_columns(tensor) if _is_due_in_columns(layer, stage, name) else tensor
        for name, tensor in named.items()
    }


def _is_due_in_columns(layer: JudgedLayer, stage: Stage, name: str) -> bool:
    if stage is Stage.WEIGHTS:
        return name.endswith(".scale") and layer.scale_format is ScaleFormat.UE8M0
    is_scale = name.endswith("_scale") and stage is not Stage.GLUE_IN
    return is_scale and lies_in_columns(layer, stage, name.removesuffix("_scale"))


def _in_columns(scale: Tensor) -> Tensor:
    """[..., R, W] with rows along the fastest axis, columns a multiple of 16 bytes apart."""
    *batch, rows, width = scale.shape
    apart = -(-rows // TMA_ALIGNED_WORDS) * TMA_ALIGNED_WORDS
    storage = torch.zeros((*batch, width, apart), dtype=scale.dtype)
    columns = storage.transpose(-1, -2)[..., :rows, :]
    columns.copy_(scale)
    return columns

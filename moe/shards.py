"""Expert weights cut along the intermediate axis: what one rank of MoE-TP holds of each expert."""

from dataclasses import replace

import torch
from torch import Tensor

from moe.indices import ceil_div
from moe.quant.fp8 import GROUP_SIZE
from moe.quant.ue8m0 import mn_major, pack_ue8m0, unpack_ue8m0
from moe.weights import ExpertMatrix, ExpertWeights


def shard_experts(weights: ExpertWeights, index: int, count: int) -> ExpertWeights:
    """Columns ``[index * I / count, (index + 1) * I / count)`` of every expert's intermediate axis.

    These are its gate rows, its up rows and its columns of w2, with the scales that cover them;
    the shards' outputs add up to the expert's. A shared expert is cut in the same way.

    Args:
        weights: [L, 2I, H] and [L, H, I], as checkpoints hold them or prepared.
        index: which shard.
        count: how many there are.

    Raises:
        ValueError: there is no such shard; I does not divide; or a shard would cut columns
            that share a scale.

    Source: SGLang 0.5.21, fused_moe_triton/layer.py::FusedMoE._load_w13, _load_w2.
    """
    if not 0 <= index < count:
        raise ValueError(f"no shard {index} among {count}")
    intermediate = weights.w2.in_features
    width = intermediate // count
    if intermediate % count:
        raise ValueError(f"an intermediate size of {intermediate} does not divide by {count}")
    if _scaled_by_group(weights.w2) and width % weights.w2.group_size:
        raise ValueError(
            f"an intermediate size of {intermediate} in {count} shards gives {width} columns each, "
            f"no multiple of the {weights.w2.group_size} that share a scale"
        )
    columns = slice(index * width, (index + 1) * width)
    return ExpertWeights(w13=_gate_up(weights.w13, columns), w2=_down(weights.w2, columns))


def _scaled_by_group(matrix: ExpertMatrix) -> bool:
    """Whether scales cover groups of columns; else there are none, or one for all of them."""
    return matrix.scale is not None and matrix.scale.dim() == 3


def _gate_up(w13: ExpertMatrix, columns: slice) -> ExpertMatrix:
    """The rows of gate and of up that compute ``columns``."""
    values, scale = _both_halves(w13.values, columns), w13.scale
    if scale is None or not _scaled_by_group(w13):
        return replace(w13, values=values)
    if scale.dtype == torch.float32:  # one for a block of rows
        return replace(w13, values=values, scale=_both_halves(scale, _groups(columns, GROUP_SIZE)))
    scale = _both_halves(scale, columns)
    scale = mn_major(scale) if scale.dtype == torch.int32 else scale
    return replace(w13, values=values, scale=scale)


def _down(w2: ExpertMatrix, columns: slice) -> ExpertMatrix:
    """The ``columns`` of w2."""
    codes_a_byte = w2.in_features // w2.values.shape[-1]
    values = w2.values[..., _groups(columns, codes_a_byte)].contiguous()
    scale = w2.scale
    if scale is None or not _scaled_by_group(w2):
        return replace(w2, values=values)
    groups = _groups(columns, w2.group_size)
    if scale.dtype == torch.int32:
        unpacked = unpack_ue8m0(scale, ceil_div(w2.in_features, w2.group_size))
        return replace(w2, values=values, scale=pack_ue8m0(unpacked[..., groups]))
    return replace(w2, values=values, scale=scale[..., groups].contiguous())


def _both_halves(rows: Tensor, part: slice) -> Tensor:
    """[L, 2N, ...] -> the rows ``part`` of the first half, then those of the second."""
    return torch.cat([half[:, part] for half in rows.chunk(2, dim=1)], dim=1)


def _groups(columns: slice, size: int) -> slice:
    """Groups of ``size`` that ``columns`` cover."""
    return slice(columns.start // size, columns.stop // size)

"""Expert weights cut along the intermediate axis: what one rank of MoE-TP holds of each expert."""

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
        ValueError: there is no such shard; I does not divide; or a shard would cut a quantised
            block of 128.

    Source: SGLang 0.5.21, fused_moe_triton/layer.py::FusedMoE._load_w13, _load_w2.
    """
    if not 0 <= index < count:
        raise ValueError(f"no shard {index} among {count}")
    intermediate = weights.w2.values.shape[-1]
    width = intermediate // count
    if intermediate % count:
        raise ValueError(f"an intermediate size of {intermediate} does not divide by {count}")
    if weights.w2.scale is not None and width % GROUP_SIZE:
        raise ValueError(
            f"an intermediate size of {intermediate} in {count} shards gives {width} columns each, "
            f"no multiple of the {GROUP_SIZE} that share a scale"
        )
    columns = slice(index * width, (index + 1) * width)
    return ExpertWeights(w13=_gate_up(weights.w13, columns), w2=_down(weights.w2, columns))


def _gate_up(w13: ExpertMatrix, columns: slice) -> ExpertMatrix:
    """The rows of gate and of up that compute ``columns``."""
    scale = w13.scale
    if scale is not None:
        by_row = scale.dtype == torch.int32
        scale = _both_halves(scale, columns if by_row else _blocks(columns))
        scale = mn_major(scale) if by_row else scale
    return ExpertMatrix(values=_both_halves(w13.values, columns), scale=scale)


def _down(w2: ExpertMatrix, columns: slice) -> ExpertMatrix:
    """The ``columns`` of w2."""
    scale = w2.scale
    if scale is not None and scale.dtype == torch.int32:
        groups = ceil_div(w2.values.shape[-1], GROUP_SIZE)
        scale = pack_ue8m0(unpack_ue8m0(scale, groups)[..., _blocks(columns)])
    elif scale is not None:
        scale = scale[..., _blocks(columns)].contiguous()
    return ExpertMatrix(values=w2.values[..., columns].contiguous(), scale=scale)


def _both_halves(rows: Tensor, part: slice) -> Tensor:
    """[L, 2N, ...] -> the rows ``part`` of the first half, then those of the second."""
    return torch.cat([half[:, part] for half in rows.chunk(2, dim=1)], dim=1)


def _blocks(columns: slice) -> slice:
    """Blocks of 128 that ``columns`` cover."""
    return slice(columns.start // GROUP_SIZE, columns.stop // GROUP_SIZE)

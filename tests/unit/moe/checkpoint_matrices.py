"""Drawn experts in every form of a checkpoint."""

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.quant.fp8 import quantize_blocks, round_to_e4m3
from moe.quant.mxfp import quantize_mxfp4, quantize_mxfp8
from moe.weights import ExpertMatrix

Shape = tuple[int, int, int]


def drawn(seed: int, shape: Shape) -> Tensor:
    """fp32 of bf16 values whose rows and groups differ by up to 2^6."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    spread = torch.randint(-6, 1, (*shape[:2], shape[2] // 32), generator=generator)
    spread = torch.exp2(spread.to(torch.float32)).repeat_interleave(32, dim=2)
    return (values * spread).to(torch.bfloat16).to(torch.float32)


def checkpoint_matrix(
    recipe: QuantRecipe, seed: int, shape: Shape, scales: tuple[float, ...] = (0.25,)
) -> ExpertMatrix:
    """[L, N, K] as a checkpoint of the recipe holds it.

    ``scales`` are those of the equal parts of a per-tensor matrix, the same in every expert.
    """
    values = drawn(seed, shape)
    match recipe:
        case QuantRecipe.BF16:
            return ExpertMatrix(values=values.to(torch.bfloat16), scale=None)
        case QuantRecipe.FP8_BLOCK128:
            blocks = quantize_blocks(values, ScaleFormat.FP32)
            return ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
        case QuantRecipe.FP8_PER_TENSOR:
            scale = torch.tensor(scales).repeat(shape[0], 1)
            return ExpertMatrix(values=round_to_e4m3(100 * values), scale=scale)
        case QuantRecipe.MXFP8:
            codes, scale = quantize_mxfp8(values)
            return ExpertMatrix(values=codes, scale=scale, group_size=32)
        case QuantRecipe.MXFP4_W4A8 | QuantRecipe.MXFP4_AS_FP8:
            codes, scale = quantize_mxfp4(values)
            return ExpertMatrix(values=codes, scale=scale, group_size=32)

"""Load-time preparation: from a checkpoint's tensors to what the GEMMs read, once, by recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.indices import ceil_div
from moe.quant.fp8 import (
    GROUP_SIZE,
    QuantizedBlocks,
    dequantize_blocks,
    e4m3_to_fp32,
    quantize_blocks,
    round_to_e4m3,
)
from moe.quant.mxfp import cast_e2m1_to_e4m3, quantize_mxfp8
from moe.quant.ue8m0 import exponent_rounded_up, pack_ue8m0
from moe.recipes import RECIPES
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights

Prepare = Callable[[ExpertMatrix, ScaleFormat], ExpertMatrix]


class ScaleTrapError(ValueError):
    """A scale that is no power of two, where the GEMM's packed format holds nothing else.

    scale     the first one
    slot      its place among the experts of the matrix
    num_more  others there
    owner     the matrix and the expert that it belongs to, where these are known
    """

    def __init__(self, scale: float, slot: int, num_more: int, owner: str = "") -> None:
        super().__init__(scale, slot, num_more, owner)
        self.scale, self.slot, self.num_more, self.owner = scale, slot, num_more, owner

    def __str__(self) -> str:
        more = f" ({self.num_more} more like it)" if self.num_more else ""
        return (
            f"the weight scale {self.scale:.9g} of {self.owner or f'slot {self.slot}'} is no power "
            f"of two: packing traps{more}; per-tensor scales are never quantised again"
        )


def prepare_weights(
    checkpoint: LayerWeights, recipe: QuantRecipe, scale_format: ScaleFormat
) -> LayerWeights:
    """Bring checkpoint weights into the layout that the GEMMs read.

    Args:
        checkpoint: in the forms of ``RECIPES[recipe].checkpoint`` and of its shared expert.
        recipe: the layer's recipe.
        scale_format: what the platform's GEMM reads.

    Raises:
        ScaleTrapError: a per-tensor scale that is no power of two, with UE8M0; it names the matrix
            and the logical expert.

    Source: SGLang 0.5.21, fp8.py::process_weights_after_loading_block_quant,
    _process_mxfp8_moe_weights; fp8_utils.py.
    """
    shared = checkpoint.shared
    if shared is not None:
        shared = _prepared(shared, RECIPES[recipe].shared, scale_format, ["the shared expert"])
    names = [f"expert {expert}" for expert in checkpoint.expert_ids.tolist()]
    experts = _prepared(checkpoint.experts, recipe, scale_format, names)
    return replace(checkpoint, experts=experts, shared=shared)


def _prepared(
    weights: ExpertWeights, recipe: QuantRecipe, scale_format: ScaleFormat, owners: Sequence[str]
) -> ExpertWeights:
    """Both matrices; a trap says whose scale it is."""
    prepared = {}
    for name, matrix in (("w13", weights.w13), ("w2", weights.w2)):
        try:
            prepared[name] = _PREPARE[recipe](matrix, scale_format)
        except ScaleTrapError as trap:
            owner = f"{name} of {owners[trap.slot]}"
            raise ScaleTrapError(trap.scale, trap.slot, trap.num_more, owner) from trap
    return ExpertWeights(**prepared)


def _kept(matrix: ExpertMatrix, scale_format: ScaleFormat) -> ExpertMatrix:
    return matrix


def prepare_blocks(matrix: ExpertMatrix, scale_format: ScaleFormat) -> ExpertMatrix:
    """Keep e4m3 blocks with fp32 scales, or with UE8M0 quantise them a second time."""
    return requantize_ue8m0(matrix) if scale_format is ScaleFormat.UE8M0 else matrix


def requantize_ue8m0(matrix: ExpertMatrix) -> ExpertMatrix:
    """Round e4m3 blocks with fp32 scales to bf16, then quantise with power-of-two scales.

    A second rounding of the weights. The scale of a block is repeated for each of its rows and
    packed four to a word.

    Source: SGLang 0.5.21, fp8_utils.py::requant_weight_ue8m0.
    """
    assert matrix.scale is not None
    as_bf16 = dequantize_blocks(QuantizedBlocks(values=matrix.values, scale_inv=matrix.scale)).to(
        torch.bfloat16
    )
    blocks = quantize_blocks(as_bf16, ScaleFormat.UE8M0)
    return ExpertMatrix(values=blocks.values, scale=_packed_by_row(blocks))


def _packed_by_row(blocks: QuantizedBlocks) -> Tensor:
    """[L, N, ceil(K/128/4)] int32: each block's power of two, repeated for its rows."""
    exponents = exponent_rounded_up(blocks.scale_inv)
    by_row = exponents.repeat_interleave(GROUP_SIZE, dim=-2)[..., : blocks.values.shape[-2], :]
    return pack_ue8m0(by_row)


def prepare_per_tensor(matrix: ExpertMatrix, scale_format: ScaleFormat) -> ExpertMatrix:
    """One scale an expert, the larger of gate's and up's, repeated for every 128 x 128 block.

    Codes under the smaller one are dequantised and rounded again. Nothing is quantised again with
    powers of two: packing takes the scale as it is.

    Raises:
        ScaleTrapError: with UE8M0, a scale that is no power of two.

    Source: SGLang 0.5.21, fp8.py::process_weights_after_loading, Fp8MoEMethod.apply.
    """
    assert matrix.scale is not None
    num_experts, num_rows, num_columns = matrix.values.shape
    largest = matrix.scale.amax(1)
    shape = (num_experts, ceil_div(num_rows, GROUP_SIZE), ceil_div(num_columns, GROUP_SIZE))
    blocks = QuantizedBlocks(
        values=_under_one_scale(matrix.values, matrix.scale, largest),
        scale_inv=largest[:, None, None].expand(shape).contiguous(),
    )
    if scale_format is not ScaleFormat.UE8M0:
        return ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
    _check_powers_of_two(largest)
    return ExpertMatrix(values=blocks.values, scale=_packed_by_row(blocks))


def _under_one_scale(values: Tensor, scale: Tensor, largest: Tensor) -> Tensor:
    """[L, N, K] e4m3 codes of P parts of rows with scales [L, P], all under ``largest`` [L].

    Dequantised to fp16 and rounded again, the part that has the largest scale, too.

    Source: SGLang 0.5.21, quantization/utils.py::per_tensor_dequantize; scaled_fp8_quant.
    """
    num_parts = scale.shape[1]
    if num_parts == 1:
        return values
    shape = (len(values), num_parts, -1, values.shape[-1])
    parts = e4m3_to_fp32(values).view(shape).mul_(scale[..., None, None])
    stored = parts.to(torch.float16).to(torch.float32)
    return round_to_e4m3(stored * largest.reciprocal()[:, None, None, None]).flatten(1, 2)


def _check_powers_of_two(scale: Tensor) -> None:
    """What the pack kernel of the pinned library does with mantissa bits: it traps.

    Without any, bits can still be those of zero, a negative number or infinity; no byte is right
    for these.

    Source: sgl-deep-gemm 0.2.0, transform_sf_into_required_layout.
    """
    bits = scale.view(torch.int32)
    exponent = bits >> 23  # negative under a sign
    wrong = (((bits & 0x7FFFFF) != 0) | (exponent < 1) | (exponent > 254)).nonzero()
    if wrong.numel():
        slot = int(wrong[0])
        raise ScaleTrapError(float(scale[slot]), slot, len(wrong) - 1)


def prepare_mxfp8(matrix: ExpertMatrix, scale_format: ScaleFormat) -> ExpertMatrix:
    """Pack the bytes of a checkpoint's scales; a bf16 checkpoint is quantised first.

    Source: SGLang 0.5.21, fp8.py::_process_mxfp8_moe_weights.
    """
    values, scale = matrix.values, matrix.scale
    if scale is None:
        values, scale = quantize_mxfp8(values)
    return ExpertMatrix(values=values, scale=pack_ue8m0(scale), group_size=32)


def prepare_mxfp4(matrix: ExpertMatrix, scale_format: ScaleFormat) -> ExpertMatrix:
    """Pack the bytes of the scales; the codes stay as they are.

    Source: SGLang 0.5.21, fp8.py::process_weights_after_loading_block_quant (fp4 experts).
    """
    assert matrix.scale is not None
    return ExpertMatrix(values=matrix.values, scale=pack_ue8m0(matrix.scale), group_size=32)


def prepare_mxfp4_as_fp8(matrix: ExpertMatrix, scale_format: ScaleFormat) -> ExpertMatrix:
    """Turn fp4 groups into e4m3 blocks with fp32 scales, and go on as with those.

    Source: SGLang 0.5.21, fp8.py (SGLANG_DSV4_FP4_DEQUANT), cast_e2m1fn_to_e4m3fn.
    """
    assert matrix.scale is not None
    blocks = cast_e2m1_to_e4m3(matrix.values, matrix.scale)
    as_blocks = ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
    return prepare_blocks(as_blocks, scale_format)


_PREPARE: Final[Mapping[QuantRecipe, Prepare]] = MappingProxyType(
    {
        QuantRecipe.BF16: _kept,
        QuantRecipe.FP8_BLOCK128: prepare_blocks,
        QuantRecipe.FP8_PER_TENSOR: prepare_per_tensor,
        QuantRecipe.MXFP8: prepare_mxfp8,
        QuantRecipe.MXFP4_W4A8: prepare_mxfp4,
        QuantRecipe.MXFP4_AS_FP8: prepare_mxfp4_as_fp8,
    }
)

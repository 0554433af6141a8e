"""Load-time layout of the weights: from checkpoint tensors to what the GEMMs consume, once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.quant.fp8 import GROUP_SIZE, QuantizedBlocks, dequantize_blocks, quantize_blocks
from moe.quant.ue8m0 import exponent_rounded_up, pack_ue8m0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertMatrix:
    """One matrix of several experts, as a checkpoint holds it or as a GEMM consumes it.

    values  [L, N, K]  bf16 or e4m3
    scale   None (bf16) | [L, ceil(N/128), ceil(K/128)] fp32, multiply by it
            | [L, N, ceil(K/128/4)] int32 packed UE8M0, MN-major
    """

    values: Tensor
    scale: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertWeights:
    """Both matrices of a set of experts.

    w13  [L, 2I, H]  gate rows first, then up rows
    w2   [L, H, I]
    """

    w13: ExpertMatrix
    w2: ExpertMatrix


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerWeights:
    """All weights one rank needs.

    expert_ids       [L]     int64  logical expert in each local slot
    experts          its matrices
    shared           the shared expert as one expert (L = 1), or None
    gate_weight      [E, H]  bf16
    correction_bias  [E]     fp32, or None
    tid2eid          [V, K]  int32 experts of each vocabulary id, in hash layers; or None
    """

    expert_ids: Tensor
    experts: ExpertWeights
    shared: ExpertWeights | None
    gate_weight: Tensor
    correction_bias: Tensor | None
    tid2eid: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CommonWeights:
    """The parts of a layer that every rank holds; fields as in ``LayerWeights``."""

    shared: ExpertWeights | None
    gate_weight: Tensor
    correction_bias: Tensor | None
    tid2eid: Tensor | None = None


class WeightSource(Protocol):
    """Where a layer's weights come from; a plain value that can be sent to a rank."""

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """Checkpoint tensors of these logical experts, at least one."""
        ...

    def common(self) -> CommonWeights:
        """What every rank holds."""
        ...

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """(w13 [2I, H], w2 [H, I]) float64 of one expert before any rounding of a recipe."""
        ...

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """The same for the shared expert."""
        ...


def checkpoint_weights(source: WeightSource, expert_ids: Sequence[int]) -> LayerWeights:
    """Checkpoint tensors of one rank that holds these logical experts."""
    common = source.common()
    return LayerWeights(
        expert_ids=torch.tensor(expert_ids, dtype=torch.int64),
        experts=source.experts(expert_ids),
        shared=common.shared,
        gate_weight=common.gate_weight,
        correction_bias=common.correction_bias,
        tid2eid=common.tid2eid,
    )


def prepare_weights(
    checkpoint: LayerWeights, recipe: QuantRecipe, scale_format: ScaleFormat
) -> LayerWeights:
    """Bring checkpoint weights into the layout the GEMMs read.

    bf16 and fp8 blocks with fp32 scales stay as they are; with UE8M0 scales the blocks are
    quantised a second time.

    Args:
        checkpoint: bf16, or e4m3 with fp32 128 x 128 block scales.
        recipe: the layer's recipe.
        scale_format: what the platform's GEMM reads.

    Source: SGLang 0.5.21, fp8.py::process_weights_after_loading_block_quant.
    """
    if recipe is QuantRecipe.BF16 or scale_format is not ScaleFormat.UE8M0:
        return checkpoint
    return replace(
        checkpoint,
        experts=_requantize_expert_weights(checkpoint.experts),
        shared=_requantize_expert_weights(checkpoint.shared) if checkpoint.shared else None,
    )


def _requantize_expert_weights(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(w13=requantize_ue8m0(weights.w13), w2=requantize_ue8m0(weights.w2))


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
    exponents = exponent_rounded_up(blocks.scale_inv)
    by_row = exponents.repeat_interleave(GROUP_SIZE, dim=-2)[..., : matrix.values.shape[-2], :]
    return ExpertMatrix(values=blocks.values, scale=pack_ue8m0(by_row))

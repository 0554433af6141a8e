"""Faults of reading a checkpoint: right tensors whose codes or scales are taken for others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from moe.faults.bits import same_values
from moe.faults.kinds import Params, Plan, plan_fault
from moe.faults.weights import ep_rank_of, placement_of
from moe.formats import ScaleFormat, Stage
from moe.quant.fp8 import QuantizedBlocks, dequantize_blocks, quantize_blocks
from moe.quant.ue8m0 import exponent_rounded_up, scale_from_exponent
from moe.recipes import RECIPES, LoadPath, WeightFormat
from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights, WeightSource

Misread = Callable[[ExpertWeights], ExpertWeights]

_FP32_EXPONENT: Final = 0x7F800000
_GROUPS_OF_32_IN_128: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MisreadExperts:
    """A source whose experts change on their way into preparation; see ``WeightSource``."""

    source: WeightSource
    misread: Misread

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """The checkpoint's tensors of these experts, misread."""
        return self.misread(self.source.experts(expert_ids))

    def common(self) -> CommonWeights:
        """What every rank holds."""
        return self.source.common()

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """As it is."""
        return self.source.ideal_expert(expert_id)

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """As it is."""
        return self.source.ideal_shared()


def requant_skipped(plan: Plan, params: Params, rank: int) -> Plan:
    """Codes kept, their fp32 scales rounded up to powers of two when they are packed.

    Codes under such scales pass the second quantising as they are.
    """
    return _misreading(plan, rank, _Each(_scales_rounded_up)) if _requantises(plan) else plan


def requant_wrong_attr(plan: Plan, params: Params, rank: int) -> Plan:
    """The first matrix is quantised again, of the second one the scales are rounded up."""

    def misread(weights: ExpertWeights) -> ExpertWeights:
        return replace(weights, w2=_scales_rounded_up(weights.w2))

    return _misreading(plan, rank, misread) if _requantises(plan) else plan


def requant_without_pow2(plan: Plan, params: Params, rank: int) -> Plan:
    """Quantised again with fp32 scales, whose mantissas are lost when they are packed."""
    return _misreading(plan, rank, _Each(_scales_cut)) if _requantises(plan) else plan


def per_tensor_scale_of_gate_for_up(plan: Plan, params: Params, rank: int) -> Plan:
    """Of the two scales of the first matrix gate's counts for up, too."""

    def misread(weights: ExpertWeights) -> ExpertWeights:
        scale = _scale(weights.w13)
        of_gate = scale[:, :1].expand(scale.shape).contiguous()
        return replace(weights, w13=replace(weights.w13, scale=of_gate))

    is_due = _checkpoint(plan) is WeightFormat.FP8_PER_TENSOR
    return _misreading(plan, rank, misread) if is_due else plan


def fp4_nibbles_swapped(plan: Plan, params: Params, rank: int) -> Plan:
    """The high half of a byte is read as the earlier column."""
    is_due = _checkpoint(plan) is WeightFormat.MXFP4
    return _misreading(plan, rank, _Each(_nibbles_swapped)) if is_due else plan


def fp4_scale_group_of_128(plan: Plan, params: Params, rank: int) -> Plan:
    """Scales are looked up as if each covered 128 columns, where it covers 32."""
    is_due = _checkpoint(plan) is WeightFormat.MXFP4
    return _misreading(plan, rank, _Each(_scales_spread)) if is_due else plan


def _checkpoint(plan: Plan) -> WeightFormat:
    return RECIPES[plan.recipe].checkpoint


def _requantises(plan: Plan) -> bool:
    """Whether preparation rounds fp8 codes a second time."""
    return RECIPES[plan.recipe].load_path(plan.scale_format) is LoadPath.REQUANTISE


def _misreading(plan: Plan, rank: int, misread: Misread) -> Plan:
    """The plan of a rank that misreads its experts; itself where that makes no difference."""
    held = plan.weights.experts(placement_of(plan).local_experts(ep_rank_of(plan, rank)))
    if same_values(held, misread(held)):
        return plan
    return replace(plan, weights=MisreadExperts(source=plan.weights, misread=misread))


@dataclass(frozen=True, slots=True)
class _Each:
    """Both matrices changed alike.

    A plan is told from another by its repr, and a closure's has no more than an address, which the
    next fault's may get.
    """

    change: Callable[[ExpertMatrix], ExpertMatrix]

    def __call__(self, weights: ExpertWeights) -> ExpertWeights:
        return ExpertWeights(w13=self.change(weights.w13), w2=self.change(weights.w2))


def _scale(matrix: ExpertMatrix) -> Tensor:
    assert matrix.scale is not None
    return matrix.scale


def _scales_rounded_up(matrix: ExpertMatrix) -> ExpertMatrix:
    scale = scale_from_exponent(exponent_rounded_up(_scale(matrix)))
    return replace(matrix, scale=scale)


def _scales_cut(matrix: ExpertMatrix) -> ExpertMatrix:
    """Quantised again with fp32 scales, of which the exponents stay."""
    stored = QuantizedBlocks(values=matrix.values, scale_inv=_scale(matrix))
    blocks = quantize_blocks(dequantize_blocks(stored).to(torch.bfloat16), ScaleFormat.FP32)
    cut = (blocks.scale_inv.view(torch.int32) & _FP32_EXPONENT).view(torch.float32)
    return replace(matrix, values=blocks.values, scale=cut)


def _nibbles_swapped(matrix: ExpertMatrix) -> ExpertMatrix:
    return replace(matrix, values=(matrix.values >> 4) | (matrix.values << 4))


def _scales_spread(matrix: ExpertMatrix) -> ExpertMatrix:
    """[L, N, G] with the scale of group ``i // 4`` for group i."""
    scale = _scale(matrix)
    return replace(matrix, scale=scale[..., torch.arange(scale.shape[-1]) // _GROUPS_OF_32_IN_128])


MISREADING_FAULTS: Final = (
    plan_fault(
        Stage.WEIGHTS,
        requant_skipped,
        "fp32 weight scales rounded up to powers of two, codes not quantised again",
        "sgl-project/sglang#16622",
    ),
    plan_fault(
        Stage.WEIGHTS,
        requant_wrong_attr,
        "the second matrix left out when weights are quantised again",
        "sgl-project/sglang#12259",
    ),
    plan_fault(
        Stage.WEIGHTS,
        requant_without_pow2,
        "weights quantised again with fp32 scales, whose mantissas packing drops",
        "vllm-project/vllm#22399",
    ),
    plan_fault(
        Stage.WEIGHTS,
        per_tensor_scale_of_gate_for_up,
        "one weight scale a matrix, gate's used for up, too",
        "NVIDIA/TensorRT-LLM#14199",
    ),
    plan_fault(
        Stage.WEIGHTS,
        fp4_nibbles_swapped,
        "two fp4 codes of a byte read the wrong way round",
        "pytorch/ao#2939",
    ),
    plan_fault(
        Stage.WEIGHTS,
        fp4_scale_group_of_128,
        "fp4 scales of 32 columns each looked up as scales of 128",
        "our own reading of bytedance-iaas/sglang#631, where both group sizes exist",
    ),
)

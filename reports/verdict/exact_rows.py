"""Quantisers, products and activations whose stored results have one answer whatever the order.

A stored value is *certain* if the ideal value lies on the stored grid, and the noise declared in
front of the store cannot move it to another number. The store then wipes the noise out.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from moe.arithmetic import FP32_ROUNDOFF, ArithmeticModel, compounded
from moe.formats import ActivationKind, GatedActivation, ScaleFormat, Stage
from moe.golden import (
    E4M3_MAX,
    GROUP_AMAX_FLOOR,
    Stores,
    gated_as_stored,
    quantize_groups,
    round_bf16,
    round_e4m3,
)
from reports.verdict.band import FP32_LARGEST, activation_noise, reciprocal_noise
from reports.verdict.exact_sums import Conditions, low_bit
from reports.verdict.layer import ScaleForm
from reports.verdict.nominal_weights import WEIGHT_SCALE_ROUNDINGS, NominalMatrix

SCALE_ROUNDINGS = 4
"""Of an activation's fp32 scale: 448's reciprocal, the product, and one ulp (two roundings) between
kernels."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CertainRows:
    """Rows in front of a GEMM.

    codes       [R, C] float64 what is stored: codes, or bf16 values
    scale       [R, G] float64 the golden's, or None
    value       [R, C] float64 what they stand for, without the rounding of an fp32 scale
    is_certain  [R, C] bool, equal within a group
    slack       [R, G] relative error that an fp32 scale may carry; None: exact
    keeps_scale whether the scale's own bits are certain: its source was stored
    quantum     [R, 1] of ``quanta``, where rows are multiplied more than once; None: found anew
    """

    codes: Tensor
    scale: Tensor | None
    value: Tensor
    is_certain: Tensor
    slack: Tensor | None = None
    keeps_scale: bool = True
    quantum: Tensor | None = None

    @property
    def quanta(self) -> Tensor:
        """[R, 1] float64, divides every value of a row."""
        return low_bit(self.value).amin(1, keepdim=True) if self.quantum is None else self.quantum

    def __getitem__(self, rows: Tensor) -> "CertainRows":
        return CertainRows(
            codes=self.codes[rows],
            scale=None if self.scale is None else self.scale[rows],
            value=self.value[rows],
            is_certain=self.is_certain[rows],
            slack=None if self.slack is None else self.slack[rows],
            keeps_scale=self.keeps_scale,
            quantum=None if self.quantum is None else self.quantum[rows],
        )

    @staticmethod
    def stored(values: Tensor, is_certain: Tensor) -> "CertainRows":
        """bf16 rows that no quantiser sees."""
        return CertainRows(codes=values, scale=None, value=values, is_certain=is_certain)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """What a quantiser reads.

    value       [R, C] float64 in front of it
    noise       [R, C] largest error that it may carry; None: none
    is_certain  [R, C] bool: known up to that noise
    ideal       [R, C] what ``value`` is a rounding step away from; None: the value itself
    """

    value: Tensor
    is_certain: Tensor
    noise: Tensor | None = None
    ideal: Tensor | None = None


def quantised(
    source: Source,
    form: ScaleForm,
    arithmetic: ArithmeticModel,
    *,
    floor: float = GROUP_AMAX_FLOOR,
) -> CertainRows:
    """Codes that round alike within the noise; one that does not spoils its whole group."""
    if form.scale_format is ScaleFormat.NONE:
        return CertainRows.stored(source.value, source.is_certain)
    is_fp32 = form.scale_format is ScaleFormat.FP32
    shape = (len(source.value), source.value.shape[1] // form.group_size, form.group_size)
    error = _relative_error(source, shape)
    edge = reciprocal_noise(arithmetic) + FP32_ROUNDOFF
    want = quantize_groups(source.value, form.scale_format, form.group_size, floor)
    moved = _together(error, edge if is_fp32 else 0.0)  # a code, over an amax that moves likewise
    moved = _together(moved, error / (1 - error).clamp(min=0.0))[..., None]
    scaled = want.scaled.view(shape)
    alike = torch.ones_like(scaled, dtype=torch.bool)
    if bool(moved.any()):
        alike = round_e4m3(scaled * (1 - moved)) == round_e4m3(scaled * (1 + moved))
    amax = (source.value if source.ideal is None else source.ideal).view(shape).abs().amax(-1)
    amax = amax.clamp(min=floor)
    codes = want.codes.view(shape)
    if is_fp32:
        value = codes * amax[..., None] / E4M3_MAX
        rounded = compounded(SCALE_ROUNDINGS, FP32_ROUNDOFF)
        slack = _together(_together(error, rounded), _distance(source, shape))
    else:
        largest = source.value.view(shape).abs().amax(-1)
        low, high = (
            quantize_groups(
                largest * (1 + side * _together(error, edge)), form.scale_format, 1, floor
            )
            for side in (-1, 1)
        )
        alike &= (low.scale == high.scale)[..., None]
        value, slack = codes * want.scale[..., None], None
    certain = (alike & source.is_certain.view(shape)).all(-1, keepdim=True).expand(shape)
    return CertainRows(
        codes=want.codes,
        scale=want.scale,
        value=value.reshape(source.value.shape),
        is_certain=certain.reshape(source.value.shape),
        slack=slack,
        keeps_scale=not is_fp32 or source.noise is None,
    )


def _together(error: Tensor, other: Tensor | float) -> Tensor:
    """Relative error of a product of two factors that carry these, second order included."""
    return error + other + error * other


def _relative_error(source: Source, shape: tuple[int, ...]) -> Tensor:
    """[R, G] largest noise over magnitude of a group's values."""
    if source.noise is None:
        return source.value.new_zeros(shape[:2])
    relative = torch.where(source.noise == 0, 0.0, source.noise / source.value.abs())
    return relative.view(shape).amax(-1)


def _distance(source: Source, shape: tuple[int, ...]) -> Tensor:
    """[R, G] how far a group's values lie beside the ideal ones, relative to these."""
    if source.ideal is None:
        return source.value.new_zeros(shape[:2])
    apart = (source.value - source.ideal).abs()
    relative = torch.where(apart == 0, 0.0, apart / source.ideal.abs())
    return relative.view(shape).amax(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Certain:
    """Stored values, and which of them are certain: [...] float64 and bool."""

    value: Tensor
    is_certain: Tensor


def stored_product(
    lhs: CertainRows,
    rhs: NominalMatrix,
    stage: Stage,
    arithmetic: ArithmeticModel,
    conditions: Conditions,
) -> Certain:
    """``lhs @ rhs.T`` rounded to bf16.

    Products between whose scales nothing comes are summed in as many bits as the backend declares;
    a sum that changed its order there would show in the last of them, hence one bit less for an
    accumulator that truncates. What fp32 scales add is noise, block by block. Magnitudes are
    float64, since a sum may have exactly as many quanta as fit.
    """
    value, magnitude = lhs.value @ rhs.value.T, lhs.value.abs() @ rhs.value.abs().T
    quantum = lhs.quanta * rhs.quantum
    bits = arithmetic.bits_in_block - arithmetic.truncates
    exact = conditions.sums(stage, f"{stage} sums", bits, quantum=quantum, magnitude=magnitude)
    stored = round_bf16(value)
    if lhs.slack is not None:
        noise = _scale_noise(lhs, rhs, lhs.slack, 2.0**-arithmetic.accumulator_bits)
        single = round_bf16(value - noise) == round_bf16(value + noise)
        single &= (value - stored).abs() <= noise
    else:
        single = stored == value
    conditions.require(f"{stage} stores one value", single)
    certain = exact & single & rhs.is_nominal
    if not bool(lhs.is_certain.all()):
        is_read = (rhs.value != 0).to(torch.float32)
        certain &= (~lhs.is_certain).to(torch.float32) @ is_read.T == 0
    return Certain(stored, certain)


def _scale_noise(lhs: CertainRows, rhs: NominalMatrix, slack: Tensor, unit: float) -> Tensor:
    """[R, N] what the rounding of fp32 scales may add: relative to each block's sum.

    Both scales are multiplied, the sum by their product, and the blocks are added up.
    """
    blocks = slack.shape[1]
    width = lhs.value.shape[1] // blocks
    of_weights = compounded(WEIGHT_SCALE_ROUNDINGS, FP32_ROUNDOFF)
    rounded = of_weights + (1 + of_weights) * compounded(2 + blocks, unit)
    noise = torch.zeros(len(lhs.value), len(rhs.value), dtype=torch.float64)
    for block in range(blocks):
        part = slice(block * width, (block + 1) * width)
        share = (lhs.value[:, part] @ rhs.value[:, part].T).abs_()
        relative = slack[:, block, None]
        noise += share.mul_(relative + (1 + relative) * rounded)
    return noise


def activated(
    gate_up: Certain, rule: GatedActivation, stores: Stores, arithmetic: ArithmeticModel
) -> Source:
    """The gated activation of stored bf16 values, with the stores of its kernel.

    A kernel that stores nothing hands its noise to the quantiser; next to it stands what a store
    would have made of it, which is what its scale is a rounding step away from.
    """
    both = gate_up.is_certain.chunk(2, dim=1)
    certain, operands = both[0] & both[1], gate_up.value
    gate, up = operands.chunk(2, dim=1)
    if stores is Stores.SILU_AND_PRODUCT:  # silu alone, before a product that is exact in fp32
        operands = torch.cat([gate, torch.ones_like(up)], dim=1)
    value = gated_as_stored(operands, rule, Stores.NOTHING)
    noise = activation_noise(operands, value, rule, arithmetic)
    stored = round_bf16(value)
    value = value.masked_fill((stored == 0) & _is_shut(gate, rule, arithmetic), 0.0)
    noise = noise.masked_fill(value == 0, 0.0)  # shut, or a factor that is 0
    if stores is Stores.NOTHING:
        return Source(value=value, noise=noise, is_certain=certain, ideal=stored)
    single = round_bf16(value - noise) == round_bf16(value + noise)
    if stores is Stores.SILU_AND_PRODUCT:
        stored = round_bf16(stored * up)
    return Source(value=stored, is_certain=certain & single)


def _is_shut(gate: Tensor, rule: GatedActivation, arithmetic: ArithmeticModel) -> Tensor:
    """[R, I] bool: gates whose exp overflows in fp32 for certain, which leaves a zero.

    Some of them leave more in float64 than a store as bf16 loses: these are one value to neither.
    """
    alpha = rule.alpha if rule.kind is ActivationKind.OAI_SWIGLU and rule.alpha else 1.0
    ulps = compounded(2 * arithmetic.transcendental_ulp, FP32_ROUNDOFF)
    return gate * alpha * (1 - FP32_ROUNDOFF) < -(log(FP32_LARGEST) + ulps)

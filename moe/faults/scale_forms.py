"""Faults of form: one side stores scales as fp32, the other reads packed words, or the reverse."""

from typing import Final

import torch
from torch import Tensor

from moe.dispatched import LowLatencyDispatchOutput
from moe.faults.kinds import FaultContext, value_fault
from moe.faults.row_edits import Sent, with_rows
from moe.faults.scale_edits import (
    Scaled,
    exponents_of,
    packed_rows,
    scaled_rows,
    with_scale,
    with_weight_scales,
)
from moe.formats import Stage
from moe.quant.ue8m0 import (
    BYTES_PER_WORD,
    exponent_rounded_up,
    mn_major,
    pack_ue8m0,
    scale_from_exponent,
    unpack_ue8m0,
)
from moe.weights import ExpertMatrix, LayerWeights


def fp32_scale_read_as_packed(weights: LayerWeights, context: FaultContext) -> LayerWeights:
    """Words of weight scales hold fp32 numbers, whose four bytes are read as four exponents."""

    def relabelled(matrix: ExpertMatrix) -> Tensor | None:
        exponents = exponents_of(matrix)
        return None if exponents is None else mn_major(_fp32_as_words(exponents))

    return with_weight_scales(weights, relabelled)


def fp32_scale_unpacked_read(value: Scaled, context: FaultContext) -> Scaled:
    """The same with the scales of a stage's rows."""
    rows = packed_rows(value, context)
    if rows is None:
        return value
    return with_scale(value, with_rows(rows.scale, rows.places, _fp32_as_words(rows.stored)))


def ue8m0_flag_dropped(sent: Sent, context: FaultContext) -> Sent:
    """Dispatch hands its powers of two over as fp32, where packed words are due."""
    rows = packed_rows(sent, context)
    if rows is None:
        return sent
    exponents = unpack_ue8m0(rows.scale, rows.scale.shape[-1] * BYTES_PER_WORD)
    scale = scale_from_exponent(exponents[..., : rows.stored.shape[1]])
    in_columns = isinstance(sent, LowLatencyDispatchOutput)
    return with_scale(sent, mn_major(scale) if in_columns else scale)


def dispatch_scale_flag_disagrees(sent: Sent, context: FaultContext) -> Sent:
    """Dispatch rounds its fp32 scales up to powers of two and packs them, where fp32 is due."""
    rows = scaled_rows(sent, context)
    if rows is None or rows.is_packed:
        return sent
    return with_scale(sent, pack_ue8m0(exponent_rounded_up(rows.scale)))


def _fp32_as_words(exponents: Tensor) -> Tensor:
    """[..., G] exponents as fp32 powers of two, of which as many words are read as are due."""
    num_words = -(-exponents.shape[-1] // BYTES_PER_WORD)
    return scale_from_exponent(exponents)[..., :num_words].view(torch.int32)


SCALE_FORM_FAULTS: Final = (
    value_fault(
        Stage.WEIGHTS,
        fp32_scale_read_as_packed,
        "bits of fp32 weight scales where packed exponents are due",
        "sgl-project/sglang#26306",
    ),
    value_fault(
        Stage.ACTIVATION,
        fp32_scale_unpacked_read,
        "bits of fp32 activation scales where packed exponents are due",
        "vllm-project/vllm#53680",
        stage="activation",
    ),
    value_fault(
        Stage.DISPATCH,
        ue8m0_flag_dropped,
        "fp32 scales handed over by dispatch where packed ones are due",
        "sgl-project/sglang#38831",
        rank="all",
    ),
    value_fault(
        Stage.DISPATCH,
        dispatch_scale_flag_disagrees,
        "packed scales handed over by dispatch where fp32 ones are due",
        "sgl-project/sglang#9946",
        rank="all",
    ),
)

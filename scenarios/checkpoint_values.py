"""Matrices of a checkpoint: as a recipe's checkpoint form, and as exact numbers."""

import torch
from torch import Tensor

from moe.quant.fp8 import E4M3_MAX
from moe.quant.mxfp import MX_GROUP_SIZE
from moe.quant.ue8m0 import scale_from_exponent
from moe.recipes import WeightFormat
from moe.weights import ExpertMatrix
from scenarios.checkpoint_checks import check_products, check_scale, check_values
from scenarios.checkpoint_files import TensorReader
from scenarios.checkpoint_forms import GROUP, LAYOUTS, StoredMatrix
from scenarios.weight_forms import checkpoint_form

_BYTES = (torch.int8, torch.uint8, torch.float8_e8m0fnu)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float64)


def read_matrix(
    reader: TensorReader,
    matrix: StoredMatrix,
    form: WeightFormat,
    *,
    parts: int = 1,
    power_of_two_scales: bool = False,
) -> ExpertMatrix:
    """One matrix as that of a single expert, [1, N, K].

    bf16 values are brought into the form like drawn ones, except under mxfp8: those stay bf16 for
    load-time preparation to quantise.

    Args:
        reader: of the checkpoint.
        matrix: where it lies.
        form: what the recipe's checkpoints hold.
        parts: matrices that it joins, 2 for gate and up.
        power_of_two_scales: bf16 values that get one scale a matrix get a power of two.

    Raises:
        CheckpointError: a file is gone, or the numbers make no weights.
    """
    values, scale = _read(reader, matrix, form)
    if scale is None:
        if not LAYOUTS[form].quantises:
            return ExpertMatrix(values=values[None], scale=None)
        return checkpoint_form(
            values[None], form, parts=parts, power_of_two_scales=power_of_two_scales
        )
    if LAYOUTS[form].block == GROUP:
        return ExpertMatrix(values=values[None], scale=scale[None], group_size=MX_GROUP_SIZE)
    factor = scale_from_exponent(scale) if scale.dtype == torch.uint8 else scale.to(torch.float32)
    return ExpertMatrix(
        values=values[None],
        scale=factor.view(1, 1) if form is WeightFormat.FP8_PER_TENSOR else factor[None],
    )


def exact_matrix(reader: TensorReader, matrix: StoredMatrix, form: WeightFormat) -> Tensor:
    """[N, K] float64 what the stored numbers stand for; every product is exact in it.

    Args:
        reader: of the checkpoint.
        matrix: where it lies.
        form: what the recipe's checkpoints hold.

    Raises:
        CheckpointError: a file is gone, or the numbers make no weights.

    Source: OCP Microscaling Formats (MX) Specification 1.0, formats E2M1 and E8M0.
    """
    values, scale = _read(reader, matrix, form)
    numbers = _numbers(values)
    return numbers if scale is None else numbers * _spread(_factors(scale), form, numbers)


def _numbers(values: Tensor) -> Tensor:
    """[N, K] bf16 or e4m3, or [N, K/2] uint8 (the earlier column in the low half), in float64."""
    if values.dtype != torch.uint8:
        return values.to(torch.float64)
    codes = torch.stack((values % 16, values // 16), dim=-1).flatten(-2)
    return _E2M1.to(codes.device)[codes.to(torch.int64)]


def _factors(scale: Tensor) -> Tensor:
    """float64 of fp32 or bf16 factors or of uint8 exponents."""
    numbers = scale.to(torch.float64)
    return torch.exp2(numbers - 127) if scale.dtype == torch.uint8 else numbers


def _spread(factors: Tensor, form: WeightFormat, numbers: Tensor) -> Tensor:
    """The factor of each number, or [1, 1] for all."""
    block = LAYOUTS[form].block
    if block is None:
        return factors.reshape(1, 1)
    by_number = factors.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return by_number[: numbers.shape[0], : numbers.shape[1]]


def _read(
    reader: TensorReader, matrix: StoredMatrix, form: WeightFormat
) -> tuple[Tensor, Tensor | None]:
    """Values and scale of one matrix, gate rows before up rows, if they make weights.

    Returns:
        [N, K] bf16 or e4m3, or [N, K/2] uint8; and fp32 or bf16 factors, or uint8 exponents.
    """
    values = _as_bytes(reader.read(matrix.values, matrix.expert)).flatten(1)
    check_values(matrix.values, values, matrix.expert)
    if matrix.scale is None:
        return _in_order(values, matrix), None
    scale = _as_bytes(reader.read(matrix.scale, matrix.expert))
    check_scale(matrix.scale, scale, form, matrix.expert)
    if _may_overflow(values, scale):
        numbers = _numbers(values)
        factors = _spread(_factors(scale), form, numbers)
        check_products(matrix.values, numbers, factors, matrix.expert)
    return _in_order(values, matrix), _in_order(scale, matrix)


def _may_overflow(values: Tensor, scale: Tensor) -> bool:
    """Whether the largest code of the format times the largest scale leaves bf16."""
    largest = _E2M1.max() if values.dtype == torch.uint8 else E4M3_MAX
    return not bool((_factors(scale).max() * largest).to(torch.bfloat16).isfinite())


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _BYTES else tensor


def _in_order(rows: Tensor, matrix: StoredMatrix) -> Tensor:
    return torch.cat((rows[0::2], rows[1::2])) if matrix.interleaved else rows

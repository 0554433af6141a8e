"""Stored numbers that make no weight: refused with the tensor and the place that hold them."""

from typing import Final

import torch
from torch import Tensor

from moe.recipes import WeightFormat
from scenarios.checkpoint_files import CheckpointError, StoredTensor, TensorProblem

_E4M3_MAGNITUDE: Final = 0x7F
"""All bits but the sign; all of them set is NaN."""

_NAN_EXPONENT: Final = 255
_SMALLEST_NORMAL: Final = 2.0**-126


def check_values(stored: StoredTensor, values: Tensor, expert: int | None = None) -> None:
    """Refuse NaN and infinity; packed fp4 has neither.

    Args:
        stored: the tensor.
        values: its numbers, or those of one entry of its first axis, as stored.
        expert: which entry.

    Raises:
        CheckpointError: a value is no finite number.

    Source: OCP 8-bit Floating Point Specification 1.0, format E4M3.
    """
    if values.dtype == torch.uint8:
        return
    if values.dtype == torch.float8_e4m3fn:
        wrong = (values.view(torch.uint8) & _E4M3_MAGNITUDE) == _E4M3_MAGNITUDE
    else:
        wrong = ~values.isfinite()
    if bool(wrong.any()):
        index = _first(wrong)
        number = _shown(values[index].to(torch.float32))
        raise _refused(stored, f"the value{_at(index, expert)} is {number}")


def check_scale(
    stored: StoredTensor, scale: Tensor, form: WeightFormat, expert: int | None = None
) -> None:
    """Refuse what scales nothing; a block of zeros may have the scale 0.

    That of a matrix is divided by where gate and up get the larger of theirs; the reciprocal of a
    subnormal one is infinite.

    Args:
        stored: the tensor.
        scale: fp32 or bf16 factors, or uint8 exponents, as stored.
        form: what the recipe's checkpoints hold.
        expert: the entry of the first axis that ``scale`` is.

    Raises:
        CheckpointError: an exponent that is NaN; a factor that is not finite or negative; or that
            of a matrix, if it is zero or subnormal.

    Source: OCP Microscaling Formats (MX) Specification 1.0, scale format E8M0.
    """
    wrong, wanted = _wrong_scales(scale, form)
    if bool(wrong.any()):
        index = _first(wrong)
        number = "NaN" if scale.dtype == torch.uint8 else _shown(scale[index])
        raise _refused(stored, f"the scale{_at(index, expert)} is {number}; wanted {wanted}")


def _wrong_scales(scale: Tensor, form: WeightFormat) -> tuple[Tensor, str]:
    """Which are, and what they should be."""
    if scale.dtype == torch.uint8:
        return scale == _NAN_EXPONENT, "a power of two"
    if form is WeightFormat.FP8_PER_TENSOR:
        is_normal = scale.isfinite() & (scale >= _SMALLEST_NORMAL)
        return ~is_normal, "a positive finite number that is not subnormal"
    return ~(scale.isfinite() & (scale >= 0)), "a finite number that is not negative"


def check_products(
    stored: StoredTensor, codes: Tensor, factors: Tensor, expert: int | None = None
) -> None:
    """Refuse codes that their scale carries out of bf16.

    Args:
        stored: the tensor of the codes.
        codes: [N, K] float64.
        factors: [N, K] or [1, 1] float64, the scale of each.
        expert: the entry of the first axis that they are.

    Raises:
        CheckpointError: a product rounds to infinity in bf16.
    """
    wrong = ~(codes * factors).to(torch.bfloat16).isfinite()
    if bool(wrong.any()):
        index = _first(wrong)
        code, factor = _shown(codes[index]), _shown(factors.expand_as(codes)[index])
        raise _refused(stored, f"the value{_at(index, expert)} overflows bf16: {code} * {factor}")


def _first(wrong: Tensor) -> tuple[int, ...]:
    """Index of the first True, in the order of memory; () in a scalar."""
    position = wrong.flatten().to(torch.uint8).argmax()
    return tuple(int(place) for place in torch.unravel_index(position, wrong.shape))


def _at(index: tuple[int, ...], expert: int | None) -> str:
    """Where it is in the whole tensor; "" in a scalar."""
    place = list(index) if expert is None else [expert, *index]
    return f" at {place}" if place else ""


def _shown(number: Tensor) -> str:
    return "NaN" if bool(number.isnan()) else f"{float(number):.9g}"


def _refused(stored: StoredTensor, message: str) -> CheckpointError:
    return CheckpointError(stored.file, [TensorProblem(stored.file, stored.name, message)])

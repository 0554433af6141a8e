"""Scales whose bytes were written in one form and read in another."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe.golden import E4M3_MAX
from reports.verdict.diagnosis.scale_sides import ScaleSides
from reports.verdict.diagnosis.words import WORD, exponents, in_fours, scales_of, words_of

Form = tuple[str, Tensor]


def forms_of(sides: ScaleSides) -> Iterator[Form]:
    """(words, [W + V, G] scales that the reader would see) of each mistaken form."""
    if not sides.is_packed:
        return
    bytes_due = exponents(sides.all_due)
    groups = sides.due.shape[1]
    as_fp32 = bytes_due << 23 | (bytes_due == 0).to(torch.int64) << 22
    yield (
        "bits of fp32 numbers read as four exponents each",
        scales_of(as_fp32[:, : sides.num_words], groups),
    )
    yield "packed words packed a second time", scales_of(_packed_twice(bytes_due), groups)
    if sides.source is not None:
        for scale in (sides.source / E4M3_MAX, sides.source * _fp32(1 / E4M3_MAX)):
            leaked = _without_masks(_fp32_tensor(scale))
            yield "fp32 scales packed by shifts alone, mantissas and all", scales_of(leaked, groups)


def _packed_twice(bytes_due: Tensor) -> Tensor:
    """[W, N] words of the exponents that words of exponents would have as fp32 numbers."""
    words = words_of(bytes_due)
    again = words_of(words >> 23 & 0xFF)
    return torch.nn.functional.pad(again, (0, words.shape[1] - again.shape[1]))


def _without_masks(scale: Tensor) -> Tensor:
    """Words of four fp32 numbers each, shifted into their places and joined."""
    four = in_fours(scale).view(torch.int32).to(torch.int64) & WORD
    joined = four[..., 0] >> 23 | four[..., 1] >> 15 | four[..., 2] >> 7 | four[..., 3] << 1
    return joined & WORD


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _fp32_tensor(values: Tensor) -> Tensor:
    return values.to(torch.float32)

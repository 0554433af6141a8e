"""Packed scales as numbers: four exponent bytes a word, the lowest first."""

import torch
from torch import Tensor

from moe.golden import unpack_ue8m0
from reports.verdict.decode import BYTES_OF_WORD, NO_NUMBER, num_words

WORD = 0xFFFFFFFF


def exponents(scale: Tensor) -> Tensor:
    """[...] int64 exponent bytes of powers of two; 255 for no number."""
    byte = torch.log2(scale.nan_to_num(1.0)).round().to(torch.int64) + 127
    return torch.where(scale.isnan(), NO_NUMBER, byte.clamp(0, NO_NUMBER - 1))


def words_of(exponent: Tensor) -> Tensor:
    """[W, ceil(G / 4)] int64 words, all positive, of [W, G] bytes."""
    four = in_fours(exponent)
    return four[..., 0] | four[..., 1] << 8 | four[..., 2] << 16 | four[..., 3] << 24


def in_fours(row: Tensor) -> Tensor:
    """[W, ceil(G / 4), 4] of [W, G], filled up with zeros."""
    missing = num_words(row.shape[1]) * BYTES_OF_WORD - row.shape[1]
    padded = torch.nn.functional.pad(row, (0, missing)).contiguous()
    return torch.unflatten(padded, 1, (-1, BYTES_OF_WORD))


def bytes_of(words: Tensor) -> Tensor:
    """[W, 4 N] int64 bytes of [W, N] int64 words."""
    return torch.stack([words >> 8 * byte & 0xFF for byte in range(BYTES_OF_WORD)], -1).flatten(-2)


def unsigned(words: Tensor) -> Tensor:
    """The same words with the highest bit as a digit; of whole numbers in any dtype."""
    return torch.where(words < 0, words + WORD + 1, words)


def scales_of(words: Tensor, groups: int) -> Tensor:
    """[W, groups] float64 scales of [W, N] words in any integer dtype, with a sign or without."""
    signed = torch.where(words > WORD >> 1, words - WORD - 1, words)
    held = unpack_ue8m0(signed.to(torch.int32).contiguous(), words.shape[1] * BYTES_OF_WORD)
    return held[:, :groups]

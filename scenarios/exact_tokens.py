"""Tokens and top-k weights of exact mode: few bits, and each row says which token it is.

A block of 128 columns holds 0 and +-1 times a power of two of its own, and in its first column
the *anchor*: eight times that power, never negative. Whoever reads an anchor knows its sign.
"""

from typing import Final

import torch
from torch import Tensor

from moe.random_tensors import integers, seeded, uniform
from scenarios.errors import InputError

BLOCK: Final = 128
ANCHOR: Final = 8.0

WATERMARK_BITS: Final = 24
_MULTIPLIER: Final = 0x9E3779B1
"""Odd, so multiplying by it is one to one modulo a power of two; 2^32 over the golden ratio."""


def exact_hidden_states(seed: int, num_tokens: int, hidden_size: int) -> Tensor:
    """[T, H] bf16: the global token list, drawn token after token.

    The first block's power of two is 1 for every token, so its anchor is a constant; the others'
    are 2 or 4.

    Raises:
        InputError: more tokens than the watermark tells apart.
    """
    columns = _watermark_columns(hidden_size)
    if num_tokens > 1 << len(columns):
        raise InputError(
            f"exact inputs of {hidden_size} columns tell {1 << len(columns)} tokens apart, "
            f"and there are {num_tokens}"
        )
    signs = integers(seeded(seed, "exact.hidden_states"), -1, 2, num_tokens, hidden_size)
    signs[:, columns] = 1 - 2 * _bits(_mixed(torch.arange(num_tokens), len(columns)), len(columns))
    units = signs.to(torch.float32)
    units[:, ::BLOCK] = ANCHOR
    power = _powers(seed, num_tokens, -(-hidden_size // BLOCK))
    return (units * power.repeat_interleave(BLOCK, dim=1)[:, :hidden_size]).to(torch.bfloat16)


def _powers(seed: int, num_tokens: int, num_blocks: int) -> Tensor:
    """[T, blocks] fp32: 1 in the first block, elsewhere 2 or 4."""
    drawn = integers(seeded(seed, "exact.powers"), 1, 3, num_tokens, num_blocks)
    drawn[:, 0] = 0
    return torch.exp2(drawn.to(torch.float32))


def exact_topk_weights(seed: int, num_tokens: int, top_k: int) -> Tensor:
    """[T, K] fp32: powers of two, of at least two sizes where K > 1, permuted for each token.

    Their sum is 1, or 3/4 where K is a power of two: equal weights would hide a wrong slot.
    """
    sizes = torch.tensor(_weight_sizes(top_k), dtype=torch.float32)
    keys = uniform(seeded(seed, "exact.topk_weights"), num_tokens, top_k, dtype=torch.float64)
    return sizes[keys.argsort(dim=1)]


def _weight_sizes(top_k: int) -> list[float]:
    """1 halved, then its largest part halved again, until there are K parts."""
    sizes = [1.0]
    while len(sizes) < top_k:
        largest = sizes.pop(0)
        sizes += [largest / 2, largest / 2]
        sizes.sort(reverse=True)
    if top_k > 1 and sizes[0] == sizes[-1]:
        sizes[top_k // 2 :] = [size / 2 for size in sizes[top_k // 2 :]]
    return sizes


def tokens_of_rows(hidden_states: Tensor) -> Tensor:
    """[R] int64: the global token that each row's watermark names.

    Args:
        hidden_states: [R, H] rows of ``exact_hidden_states`` in any float dtype and scale; only the
            signs of some columns count.
    """
    columns = _watermark_columns(hidden_states.shape[1])
    bits = (hidden_states[:, columns].to(torch.float32) < 0).to(torch.int64)
    mixed = (bits << torch.arange(len(columns))).sum(dim=1)
    return _unmixed(mixed, len(columns))


def _watermark_columns(hidden_size: int) -> Tensor:
    """Columns whose sign is a bit of the watermark: the first ones that are no anchor."""
    columns = torch.arange(hidden_size)
    return columns[columns % BLOCK != 0][:WATERMARK_BITS]


def _bits(values: Tensor, count: int) -> Tensor:
    """[T, count] int64 bits of [T], lowest first."""
    return (values[:, None] >> torch.arange(count)) & 1


def _mixed(tokens: Tensor, bits: int) -> Tensor:
    """One to one, and neighbours differ in many bits: else most rows had equal high bits."""
    half, mask = -(-bits // 2), (1 << bits) - 1
    spread = (tokens * (_MULTIPLIER & mask)) & mask
    return spread ^ (spread >> half)


def _unmixed(mixed: Tensor, bits: int) -> Tensor:
    """Inverse of ``_mixed``."""
    half, mask = -(-bits // 2), (1 << bits) - 1
    spread = mixed ^ (mixed >> half)
    return (spread * pow(_MULTIPLIER & mask, -1, 1 << bits)) & mask

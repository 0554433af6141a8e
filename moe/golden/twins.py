"""Twins of the golden: the same recipe with fp32 sums in other orders, equally right.

What they differ by is what any right implementation may differ by.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.golden.mlp import Arithmetic, Rounding, rounded_at
from moe.golden.model import GoldenModel
from moe.golden.path import SharedInSum
from moe.golden.quantize import Quantized, quantize_groups

NUM_PIECES: Final = 4
"""Pieces that a sum's terms are cut into; their sums are added in any order."""


def twin_arithmetic(model: GoldenModel, seed: int) -> Arithmetic:
    """The recipe's rounding points; sums in fp32, of shuffled pieces of K, experts and ranks.

    Activations are computed in fp32, and so is what quantisers round. Where ranks store their
    part of a shared expert with their own sum, ranks keep their order.
    """
    generator = torch.Generator().manual_seed(seed)
    recipe = rounded_at(model, _to_bf16, _in_groups)

    def shuffled(count: int) -> Sequence[int]:
        order: list[int] = torch.randperm(count, generator=generator, device="cpu").tolist()
        return order

    return replace(
        recipe,
        quantize=_in_float64(recipe.quantize),
        dispatch=_in_float64(recipe.dispatch),
        quantize_middle=_in_float64(recipe.quantize_middle),
        product=lambda x, weight: _in_pieces(x.to(torch.float32), weight, generator),
        order=shuffled if model.path.shared is SharedInSum.ABSENT else recipe.order,
        summed_in=torch.float32,
    )


def _in_groups(x: Tensor, scales: ScaleFormat, group_size: int, floor: float) -> Quantized:
    return quantize_groups(x, scales, group_size, floor, in_fp32=True)


def _in_float64(quantizer: Rounding) -> Rounding:
    """The quantiser of fp32 values, its result in fp32."""
    return lambda values: quantizer(values.to(torch.float64)).to(torch.float32)


def _in_pieces(x: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """[R, N] fp32 product: K cut at random places, the pieces' sums added in a random order."""
    columns = x.shape[1]
    drawn = torch.randint(columns + 1, (NUM_PIECES - 1,), generator=generator, device="cpu")
    cuts = drawn.sort().values.tolist()
    pieces = list(zip([0, *cuts], [*cuts, columns], strict=True))
    total = x.new_zeros(x.shape[0], weight.shape[0])
    for place in torch.randperm(NUM_PIECES, generator=generator, device="cpu").tolist():
        piece = slice(*pieces[place])
        total += x[:, piece] @ weight[:, piece].to(torch.float32).T
    return total


def _to_bf16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(torch.float32)

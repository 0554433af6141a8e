"""Random tensors that depend on what they are, never on who draws them or where.

Values are drawn on the CPU and handed to torch's default device. Large matrices are computed there:
each value is a hash of its place, in integers, so that a GPU has the very same ones.
"""

import hashlib
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

LANES: Final = 4
"""Values that one 64-bit hash makes: 16 bits each choose a quantile of the normal distribution."""

_STEP: Final = 0x9E3779B97F4A7C15
"""Odd, 2^64 over the golden ratio: successive places are far apart before they are mixed."""


def seeded(seed: int, *name: str | int) -> torch.Generator:
    """A CPU generator for one named tensor.

    Args:
        seed: the scenario's seed.
        name: what is drawn: tensor name, global expert. Never a rank, world size or device.
    """
    return torch.Generator().manual_seed(_key(seed, *name) >> 1)


def uniform(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values in [0, 1)."""
    return _handed_over(torch.rand(shape, generator=generator, dtype=dtype, device="cpu"))


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    """int64 values in [low, high)."""
    return _handed_over(torch.randint(low, high, shape, generator=generator, device="cpu"))


def permutation(generator: torch.Generator, count: int) -> Tensor:
    """[count] int64, each number below ``count`` once."""
    return _handed_over(torch.randperm(count, generator=generator, device="cpu"))


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal fp32 values."""
    return _handed_over(torch.randn(shape, generator=generator, device="cpu"))


def normal(generator: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
    """Normal fp32 values rounded to bf16."""
    return (gaussian(generator, *shape) * std).to(torch.bfloat16)


def hashed_normal(seed: int, *name: str | int, shape: tuple[int, ...], std: float = 1.0) -> Tensor:
    """Normal values of 65,536 sizes in bf16, each a hash of its place; for matrices of millions.

    Args:
        seed: as of ``seeded``.
        name: as of ``seeded``.
        shape: of the tensor.
        std: spread.
    """
    count = torch.Size(shape).numel()
    hashes = _mixed(_key(seed, *name), -(-count // LANES))
    place = hashes.view(torch.int16)[:count].to(torch.int32) & 0xFFFF
    return _handed_over(_quantiles(std)).index_select(0, place).view(shape)


@lru_cache(maxsize=16)
def _quantiles(std: float) -> Tensor:
    """[65536] bf16, on the CPU: the middles of as many equally likely slices, lowest first."""
    middles = (torch.arange(1 << 16, dtype=torch.float64, device="cpu") + 0.5) / (1 << 16)
    values: Tensor = torch.special.ndtri(middles) * std
    return values.to(torch.bfloat16)


def _key(seed: int, *name: str | int) -> int:
    """64 bits of a name."""
    text = "/".join(str(part) for part in (seed, *name))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mixed(key: int, count: int) -> Tensor:
    """[count] int64: SplitMix64 of the places 0, 1, ... under a key; products wrap around.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014; the
    finalizer is David Stafford's mix 13.
    """
    bits = torch.arange(count, dtype=torch.int64).mul_(_signed(_STEP)).add_(_signed(key))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= _shifted(bits, shift)
        bits *= _signed(factor)
    return bits.bitwise_xor_(_shifted(bits, 31))


def _shifted(bits: Tensor, count: int) -> Tensor:
    """To the right, zeros coming in: int64's own shift repeats the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _signed(bits: int) -> int:
    """64 bits as the int64 that has them."""
    return bits - (1 << 64) if bits >> 63 else bits


def _handed_over(values: Tensor) -> Tensor:
    return values.to(torch.get_default_device())

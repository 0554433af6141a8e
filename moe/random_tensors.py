"""Random tensors that depend on what they are, never on who draws them."""

import hashlib

import torch
from torch import Tensor


def seeded(seed: int, *name: str | int) -> torch.Generator:
    """A CPU generator for one named tensor.

    Args:
        seed: the scenario's seed.
        name: what is drawn: tensor name, global expert. Never a rank, world size or device.
    """
    text = "/".join(str(part) for part in (seed, *name))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def normal(generator: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
    """Normal fp32 values rounded to bf16."""
    return (torch.randn(shape, generator=generator, device="cpu") * std).to(torch.bfloat16)

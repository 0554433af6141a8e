"""Draws depend on seed and name, on nothing else."""

from hashlib import blake2b
from statistics import NormalDist

import pytest
import torch

from moe.random_tensors import (
    hashed_normal,
    integers,
    normal,
    permutation,
    seeded,
    uniform,
)


def drawn(seed: int, *name: str | int) -> list[float]:
    return normal(seeded(seed, *name), 4, 8).flatten().tolist()


def test_one_draw_is_pinned():
    values = normal(seeded(7, "expert.w13", 3), 16, std=0.5)
    assert values[:4].tolist() == [-0.04736328125, -0.1708984375, -0.6875, -0.203125]


def test_the_same_name_draws_the_same_values():
    assert drawn(7, "w13", 3) == drawn(7, "w13", 3)


@pytest.mark.parametrize(
    "other", [(8, "w13", 3), (7, "w2", 3), (7, "w13", 4)], ids=["seed", "tensor", "expert"]
)
def test_another_seed_tensor_or_expert_draws_other_values(other):
    assert drawn(*other) != drawn(7, "w13", 3)


def test_a_draw_neither_reads_nor_moves_the_global_generator():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    drawn(7, "w13", 3)
    assert torch.equal(torch.rand(3), expected)


def test_values_are_bf16_with_the_spread_asked_for():
    values = normal(seeded(7, "spread"), 200, 500, std=4.0)
    assert values.dtype == torch.bfloat16
    assert values.to(torch.float64).std().item() == pytest.approx(4.0, rel=0.02)


def split_mix_64(key: int, count: int) -> list[int]:
    """In Python's integers, modulo 2^64, as the paper writes it."""
    mixed, modulus = [], 1 << 64
    for place in range(count):
        bits = (place * 0x9E3779B97F4A7C15 + key) % modulus
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) % modulus
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) % modulus
        mixed.append(bits ^ (bits >> 31))
    return mixed


def test_a_value_is_the_quantile_that_sixteen_bits_of_its_places_hash_choose():
    key = int.from_bytes(blake2b(b"7/expert.w13/3", digest_size=8).digest(), "little")
    lanes = [(bits >> 16 * lane) % (1 << 16) for bits in split_mix_64(key, 64) for lane in range(4)]
    due = torch.tensor([NormalDist(sigma=0.5).inv_cdf((lane + 0.5) / (1 << 16)) for lane in lanes])
    values = hashed_normal(7, "expert.w13", 3, shape=(2, 127), std=0.5)
    assert values.dtype == torch.bfloat16
    assert torch.equal(values.flatten(), due.to(torch.bfloat16)[:254])


def test_hashed_values_have_the_spread_asked_for_and_neighbours_know_nothing_of_each_other():
    values = hashed_normal(7, "spread", shape=(1000, 1000), std=4.0).to(torch.float64)
    assert values.std().item() == pytest.approx(4.0, rel=0.005)
    for one, other in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1])):
        assert abs((one * other).mean().item()) < 16 * 5 / 1000  # five standard errors


@pytest.mark.parametrize(
    "other", [(8, "w13", 3), (7, "w2", 3), (7, "w13", 4)], ids=["seed", "tensor", "expert"]
)
def test_another_seed_tensor_or_expert_hashes_to_other_values(other):
    one, another = (hashed_normal(*name, shape=(100,)) for name in ((7, "w13", 3), other))
    assert (one == another).sum() < 5


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: normal(generator, 3),
        lambda generator: uniform(generator, 3),
        lambda generator: integers(generator, 0, 9, 3),
        lambda generator: permutation(generator, 3),
        lambda generator: hashed_normal(7, "w2", shape=(3,)),
    ],
    ids=["normal", "uniform", "integers", "permutation", "hashed"],
)
def test_values_are_handed_to_the_default_device(draw):
    with torch.device("meta"):
        assert draw(seeded(7, "w2")).device == torch.device("meta")

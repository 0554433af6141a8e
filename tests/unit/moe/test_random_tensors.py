"""Draws depend on seed and name, on nothing else."""

import pytest
import torch

from moe.random_tensors import normal, seeded


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

"""Moving values between devices keeps their layout, and weights are drawn in one place."""

from dataclasses import dataclass

import pytest
import torch

from moe.devices import WeightsOnDevice, moved, on_device, weights_on
from moe.quant.ue8m0 import mn_major

META = torch.device("meta")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 5),
        mn_major(torch.zeros(3, 5)),
        mn_major(torch.zeros(2, 3, 5)),
        torch.zeros(4, 6)[:, 1:3],
        torch.zeros(0, 7),
        torch.zeros(()),
    ],
    ids=["row-major", "columns of four", "slabs of them", "a slice", "empty", "a number"],
)
def test_a_tensor_keeps_its_strides_on_another_device(tensor):
    there = moved(tensor, META)
    assert (there.device, there.shape) == (META, tensor.shape)
    assert there.stride() == tensor.stride()


def test_a_tensor_that_is_there_is_not_copied():
    tensor = torch.zeros(3)
    assert moved(tensor, CPU) is tensor


@dataclass(frozen=True)
class Outer:
    inner: "Inner"
    table: dict[str, torch.Tensor]
    count: int


@dataclass(frozen=True)
class Inner:
    values: torch.Tensor
    scale: torch.Tensor | None


def test_values_are_moved_whole():
    value = Outer(Inner(torch.zeros(2), None), {"a": torch.zeros(3)}, 7)
    there = on_device(value, META)
    assert there.inner.values.device == there.table["a"].device == META
    assert (there.inner.scale, there.count) == (None, 7)


def test_a_source_on_its_own_device_stays_the_source():
    source = object()
    assert weights_on(source, "cpu") is source


class Drawn:
    """A source that draws where torch draws by default."""

    def ideal_expert(self, expert_id):
        return torch.ones(2, 2), torch.ones(2, 2)

    def ideal_shared(self):
        return None


def test_weights_are_made_on_the_sources_device_whatever_the_default_one():
    with META:
        w13, _ = WeightsOnDevice(source=Drawn(), device=CPU).ideal_expert(0)
    assert w13.sum() == 4


def test_a_layer_without_a_shared_expert_has_none_on_a_device():
    assert WeightsOnDevice(source=Drawn(), device=CPU).ideal_shared() is None

"""Values of tensors on another device, and weights that are handed over there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor

from moe.weights import CommonWeights, ExpertWeights, WeightSource

V = TypeVar("V")

CPU: Final = torch.device("cpu")


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, with the strides that it has, gaps between its elements included."""
    if tensor.device == device:
        return tensor
    flat = tensor.as_strided((_elements_spanned(tensor),), (1,)).to(device)
    return flat.as_strided(tensor.shape, tensor.stride())


def on_device(value: V, device: torch.device) -> V:
    """Dataclasses and mappings of tensors, nested ones too, on a device; others are left."""
    if isinstance(value, Tensor):
        return cast("V", moved(value, device))
    if isinstance(value, Mapping):
        return cast("V", {key: on_device(one, device) for key, one in value.items()})
    if not is_dataclass(value) or isinstance(value, type):
        return value
    made: dict[str, Any] = {
        one.name: on_device(getattr(value, one.name), device) for one in fields(value) if one.init
    }
    return cast("V", type(value)(**made))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOnDevice:
    """A source that makes its weights on a device; their values are the same on every one."""

    source: WeightSource
    device: torch.device

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """See ``WeightSource``."""
        with self.device:
            return self.source.experts(expert_ids)

    def common(self) -> CommonWeights:
        """See ``WeightSource``."""
        with self.device:
            return self.source.common()

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """See ``WeightSource``."""
        with self.device:
            return self.source.ideal_expert(expert_id)

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """See ``WeightSource``."""
        with self.device:
            return self.source.ideal_shared()


def weights_on(source: WeightSource, device: str) -> WeightSource:
    """The source itself, or one that makes its weights on a device other than the CPU."""
    if device == CPU.type:
        return source
    return WeightsOnDevice(source=source, device=torch.device(device))


def _elements_spanned(tensor: Tensor) -> int:
    """From the first element in memory to the last; 0 for an empty tensor."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)

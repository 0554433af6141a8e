"""Traces as plain bytes: Ray's object store cannot carry float8, and would lose odd strides.

A packed value holds numpy arrays, which pickle protocol 5 moves without copying.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from actors.rank_program import RankReport
from moe.batch import LayerInput
from moe.devices import CPU, moved
from moe.formats import Stage
from moe.trace import RankTrace, StageTensors, named_tensors
from topology.collectives import CollectiveCall


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedTensor:
    """One tensor of any dtype and layout.

    dtype    its torch name, such as ``float8_e4m3fn``
    strides  in elements
    data     [bytes] uint8, from the tensor's first element in memory to its last
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    data: NDArray[np.uint8]


PackedInput = Mapping[str, PackedTensor]
"""A ``LayerInput`` on its way: what it holds, by field."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedReport:
    """A ``RankReport`` on its way."""

    rank: int
    stages: Mapping[str, Mapping[str, PackedTensor]]
    calls: tuple[CollectiveCall, ...]
    acted: frozenset[str]
    seconds: float


def pack(tensor: Tensor) -> PackedTensor:
    """The bytes a tensor spans, gaps between its elements included.

    Args:
        tensor: any dtype, any non-negative strides, any device.

    Returns:
        A view of the tensor's memory where it lies on the CPU: pack, send, and only then write.
    """
    values = moved(tensor.detach(), CPU)
    span = _elements_spanned(values.shape, values.stride())
    flat = values.as_strided((span,), (1,))
    return PackedTensor(
        dtype=str(values.dtype).removeprefix("torch."),
        shape=tuple(values.shape),
        strides=values.stride(),
        data=flat.view(torch.uint8).numpy(),
    )


def unpack(packed: PackedTensor) -> Tensor:
    """The tensor of ``pack`` again, in the memory of ``packed.data``: to be read, not written."""
    dtype = getattr(torch, packed.dtype)
    return _tensor_over(packed.data).view(dtype).as_strided(packed.shape, packed.strides)


def pack_input(given: LayerInput) -> PackedInput:
    """What a rank is handed, without what it is not."""
    return {name: pack(tensor) for name, tensor in named_tensors(given)}


def unpack_input(packed: PackedInput) -> LayerInput:
    """The input of ``pack_input`` again."""
    return LayerInput(**{name: unpack(tensor) for name, tensor in packed.items()})


def pack_report(report: RankReport, known: Collection[Stage] = ()) -> PackedReport:
    """A report without the stages that the receiver has already."""
    stages = {
        str(stage): {name: pack(tensor) for name, tensor in tensors.items()}
        for stage, tensors in report.trace.stages.items()
        if stage not in known
    }
    return PackedReport(
        rank=report.trace.rank,
        stages=stages,
        calls=report.calls,
        acted=report.acted,
        seconds=report.seconds,
    )


def unpack_report(packed: PackedReport, known: Mapping[Stage, StageTensors]) -> RankReport:
    """The report of ``pack_report`` again.

    Args:
        packed: what arrived.
        known: the stages that were left out of it.
    """
    arrived = {
        Stage(stage): {name: unpack(tensor) for name, tensor in tensors.items()}
        for stage, tensors in packed.stages.items()
    }
    return RankReport(
        trace=RankTrace(rank=packed.rank, stages={**known, **arrived}),
        calls=packed.calls,
        acted=packed.acted,
        seconds=packed.seconds,
    )


def _elements_spanned(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one in memory; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _tensor_over(data: NDArray[Any]) -> Tensor:
    """A tensor over memory that Ray hands out read-only; ``torch.from_numpy`` would warn of it."""
    return from_dlpack(data)

"""Whether a fault has changed anything: equality of stage values in every bit."""

import torch
from torch import Tensor

from moe.trace import named_tensors


def same_values(one: object, other: object) -> bool:
    """Whether two values of a stage are equal in every bit of every tensor."""
    if one is other:
        return True
    ours, theirs = dict(named_tensors(one)), dict(named_tensors(other))
    return ours.keys() == theirs.keys() and all(same_bits(ours[n], theirs[n]) for n in ours)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bytes, NaN included."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one is other or torch.equal(_bytes(one), _bytes(other))


def same_layouts(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits in the same strides."""
    return one.stride() == other.stride() and same_bits(one, other)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)

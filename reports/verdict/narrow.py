"""float64 values kept in fewer bytes."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe.golden import GoldenTrace


def narrowest(values: Tensor) -> Tensor:
    """float64 values in the first of bf16, fp32 and float64 that has them all."""
    for dtype in (torch.bfloat16, torch.float32):
        narrow = values.to(dtype)
        if torch.equal(narrow.to(torch.float64).nan_to_num_(nan=0.0), values.nan_to_num(nan=0.0)):
            return narrow
    return values


def with_narrow_routes(golden: GoldenTrace) -> GoldenTrace:
    """A golden's rows of routes, K times as many as of tokens: most were stored as bf16."""
    return _with_routes(golden, narrowest)


def with_routes_in_fp32(ideal: GoldenTrace) -> GoldenTrace:
    """The same of a golden without rounding, of whose routes distances alone are asked."""
    return _with_routes(ideal, lambda values: values.to(torch.float32))


def _with_routes(golden: GoldenTrace, kept: Callable[[Tensor], Tensor]) -> GoldenTrace:
    return replace(
        golden,
        gate_up=kept(golden.gate_up),
        activation=kept(golden.activation),
        expert_output=kept(golden.expert_output),
    )

"""The end of the layer on each rank: the shared expert, the reduction, and their addition.

Behind an all-to-all the routed branch is summed already. Elsewhere it is this rank's part of a sum
over the ranks, so there are two tails more: the shared expert belongs before that sum or after it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe.quant.fp8 import QuantizedRows
from moe.quant.ue8m0 import tma_aligned
from moe.runner import LoadedExperts, RunnerCore
from moe.stages import CombineOutput, SharedExpertOutput, TailOutput

Reduce = Callable[[Tensor], Tensor]
"""[T, H] bf16 of this rank -> their sum over all ranks, bf16."""


class Tail(Protocol):
    """Finishes a layer."""

    def finish(self, hidden_states: Tensor, combined: CombineOutput) -> TailOutput:
        """Add what belongs to the routed branch.

        Args:
            hidden_states: [T, H] bf16, the layer's input.
            combined: [T, H] the routed branch.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedExpert:
    """The dense path through the shared expert, or through one shard of it.

    weights   as one expert
    runner    activation and GEMM backend
    quantize  bf16 rows -> codes and scales in front of it; None keeps bf16
    """

    weights: LoadedExperts
    runner: RunnerCore
    quantize: Callable[[Tensor], QuantizedRows] | None

    def __call__(self, hidden_states: Tensor) -> SharedExpertOutput:
        """[T, H] bf16 through the expert, step by step."""
        gemm_nt, group = self.runner.gemm.gemm_nt, self.runner.middle_group
        quantized = self.quantize(hidden_states) if self.quantize else None
        rows = quantized.values if quantized else hidden_states
        scale = tma_aligned(quantized.scale) if quantized else None
        gate_up = gemm_nt(rows, scale, self.weights.w13, self.runner.input_group)
        middle = self.runner.activate_dense(gate_up)
        output = gemm_nt(middle.hidden_states, middle.hidden_states_scale, self.weights.w2, group)
        return SharedExpertOutput(
            input=rows,
            input_scale=scale,
            gate_up=gate_up,
            activation=middle.activation,
            hidden_states=middle.hidden_states,
            hidden_states_scale=middle.hidden_states_scale,
            output=output,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReplicatedSharedTail:
    """Behind an all-to-all: the sum is taken, the whole shared expert is added to it, once.

    shared                 the whole shared expert, or None
    routed_scaling_factor  acts here, with the addition

    Source: SGLang 0.5.21, deepseek_v2.py::forward_deepep.
    """

    shared: SharedExpert | None
    routed_scaling_factor: float

    def finish(self, hidden_states: Tensor, combined: CombineOutput) -> TailOutput:
        """``shared(x) + routed_scaling_factor * routed``: fp32 inside, one rounding to bf16."""
        scaled = combined.routed.to(torch.float32) * self.routed_scaling_factor
        if self.shared is None:
            return TailOutput(shared=None, output=scaled.to(torch.bfloat16))
        shared = self.shared(hidden_states)
        output = (shared.output.to(torch.float32) + scaled).to(torch.bfloat16)
        return TailOutput(shared=shared, output=output)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedBeforeSumTail:
    """The shared expert is part of what this rank gives to the sum over the ranks.

    Each rank has a shard of it; or one rank has all of it and the others None, where the sum is
    taken by glue_out; or no rank adds any here.

    shared  what this rank adds, or None
    reduce  takes the sum; None: glue_out does

    Source: SGLang 0.5.21, deepseek_v2.py::forward_normal.
    """

    shared: SharedExpert | None
    reduce: Reduce | None

    def finish(self, hidden_states: Tensor, combined: CombineOutput) -> TailOutput:
        """``sum over ranks of (routed + shared(x))``: one rounding before the sum, one by it."""
        shared = self.shared(hidden_states) if self.shared else None
        summand = combined.routed if shared is None else _add(combined.routed, shared.output)
        reduced = self.reduce(summand) if self.reduce else None
        output = summand if reduced is None else reduced
        return TailOutput(shared=shared, output=output, summand=summand, reduced=reduced)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedAfterSumTail:
    """Every rank has the whole shared expert and adds it to the finished sum.

    shared  the whole shared expert
    reduce  takes the sum over the ranks

    Source: SGLang 0.5.21, deepseek_v2.py::forward_normal, shared experts that are not sharded.
    """

    shared: SharedExpert
    reduce: Reduce

    def finish(self, hidden_states: Tensor, combined: CombineOutput) -> TailOutput:
        """``shared(x) + sum over ranks of routed``: one rounding by the sum, one after it."""
        shared = self.shared(hidden_states)
        reduced = self.reduce(combined.routed)
        return TailOutput(
            shared=shared,
            output=_add(reduced, shared.output),
            summand=combined.routed,
            reduced=reduced,
        )


def _add(first: Tensor, second: Tensor) -> Tensor:
    """bf16 + bf16: fp32 inside, one rounding."""
    return (first.to(torch.float32) + second.to(torch.float32)).to(torch.bfloat16)

"""Shared expert, scaling factor and their addition: the end of the layer on each rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.quant.fp8 import QuantizedRows
from moe.runner import LoadedExperts, RunnerCore
from moe.stages import CombineOutput, SharedExpertOutput, TailOutput


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReplicatedSharedTail:
    """Every rank holds the whole shared expert and adds it to its own tokens, once.

    shared                 the shared expert as one expert, or None
    runner                 activation and GEMM backend of the dense path
    quantize               bf16 rows -> codes and scales in front of it; None keeps bf16
    routed_scaling_factor  acts here, with the addition

    Source: SGLang 0.5.21, deepseek_v2.py::forward_deepep.
    """

    shared: LoadedExperts | None
    runner: RunnerCore
    quantize: Callable[[Tensor], QuantizedRows] | None
    routed_scaling_factor: float

    def finish(self, hidden_states: Tensor, combined: CombineOutput) -> TailOutput:
        """``shared(x) + routed_scaling_factor * routed``: fp32 inside, one rounding to bf16.

        Args:
            hidden_states: [T, H] bf16, the layer's input.
            combined: the routed branch.
        """
        scaled = combined.routed.to(torch.float32) * self.routed_scaling_factor
        if self.shared is None:
            return TailOutput(shared=None, output=scaled.to(torch.bfloat16))
        shared = self._shared_expert(hidden_states, self.shared)
        output = (shared.output.to(torch.float32) + scaled).to(torch.bfloat16)
        return TailOutput(shared=shared, output=output)

    def _shared_expert(self, hidden_states: Tensor, weights: LoadedExperts) -> SharedExpertOutput:
        quantized = self.quantize(hidden_states) if self.quantize else None
        rows = quantized.values if quantized else hidden_states
        scale = quantized.scale if quantized else None
        gate_up = self.runner.gemm.gemm_nt(rows, scale, weights.w13)
        middle = self.runner.activate(gate_up)
        output = self.runner.gemm.gemm_nt(
            middle.hidden_states, middle.hidden_states_scale, weights.w2
        )
        return SharedExpertOutput(
            input=rows,
            input_scale=scale,
            gate_up=gate_up,
            activation=middle.activation,
            hidden_states=middle.hidden_states,
            hidden_states_scale=middle.hidden_states_scale,
            output=output,
        )

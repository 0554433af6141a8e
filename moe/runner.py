"""GEMM1, activation with quantisation, GEMM2, on rows in the contiguous layout."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from moe.activation import silu_and_mul
from moe.formats import Stage
from moe.grouped_gemm import GemmBackend, LoadedMatrix
from moe.quant.fp8 import QuantizedRows
from moe.rows import spread_rows, spread_scales, take_rows
from moe.stages import ActivationOutput, ContigInput, Gemm1Output, Gemm2Output
from moe.tap import Tap


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedExperts:
    """Both matrices of a set of experts as the GEMM backend keeps them."""

    w13: LoadedMatrix
    w2: LoadedMatrix


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunnerCore:
    """The experts' computation.

    gemm          who multiplies
    quantize      bf16 rows -> codes and scales between the GEMMs; None keeps bf16
    swiglu_limit  clamp of the gated activation, or None
    """

    gemm: GemmBackend
    quantize: Callable[[Tensor], QuantizedRows] | None
    swiglu_limit: float | None

    def run(self, rows: ContigInput, experts: LoadedExperts, tap: Tap) -> Gemm2Output:
        """Expert outputs of every grouped row, unweighted; taps each of the three stages."""
        gate_up = self.gemm.grouped_gemm_nt_contig(
            rows.hidden_states, rows.hidden_states_scale, experts.w13, rows.m_indices
        )
        first = tap(Stage.GEMM1, Gemm1Output(gate_up=gate_up))
        live = self.activate(take_rows(first.gate_up, rows.live_rows))
        middle = tap(Stage.ACTIVATION, _spread(live, rows.live_rows, gate_up.shape[0]))
        output = self.gemm.grouped_gemm_nt_contig(
            middle.hidden_states, middle.hidden_states_scale, experts.w2, rows.m_indices
        )
        return tap(Stage.GEMM2, Gemm2Output(output=output))

    def activate(self, gate_up: Tensor) -> ActivationOutput:
        """Clamp, silu and multiply, round to bf16, then quantise where the recipe does."""
        activation = silu_and_mul(gate_up, self.swiglu_limit)
        if self.quantize is None:
            return ActivationOutput(
                activation=activation, hidden_states=activation, hidden_states_scale=None
            )
        quantized = self.quantize(activation)
        return ActivationOutput(
            activation=activation,
            hidden_states=quantized.values,
            hidden_states_scale=quantized.scale,
        )


def _spread(live: ActivationOutput, places: Tensor, num_rows: int) -> ActivationOutput:
    """Live rows back in their places: padding stays poison, which no GEMM here need multiply."""
    activation = spread_rows(live.activation, places, num_rows)
    if live.hidden_states_scale is None:
        return ActivationOutput(
            activation=activation, hidden_states=activation, hidden_states_scale=None
        )
    return ActivationOutput(
        activation=activation,
        hidden_states=spread_rows(live.hidden_states, places, num_rows),
        hidden_states_scale=spread_scales(live.hidden_states_scale, places, num_rows),
    )

"""GEMM1, activation with quantisation, GEMM2, on rows in either grouped layout."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from torch import Tensor

from moe.activation import silu_and_mul, silu_rounded_and_mul, unrounded_silu_and_mul
from moe.formats import Stage
from moe.grouped_gemm import GemmBackend, LoadedMatrix
from moe.indices import slab_rows
from moe.quant.fp8 import QuantizedRows
from moe.rows import spread_rows, spread_scales, take_rows
from moe.slabs import spread_slab_scales, spread_slabs
from moe.stages import (
    ActivationOutput,
    ContigInput,
    Gemm1Output,
    Gemm2Output,
    MaskedInput,
    RunnerInput,
)
from moe.tap import Tap

Quantizer = Callable[[Tensor], QuantizedRows]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedExperts:
    """Both matrices of a set of experts as the GEMM backend keeps them."""

    w13: LoadedMatrix
    w2: LoadedMatrix


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunnerCore:
    """The experts' computation.

    gemm            who multiplies
    quantize        bf16 rows -> codes and scales between the GEMMs; None keeps bf16
    swiglu_limit    clamp of the gated activation, or None
    quantize_fused  fp32 rows -> codes and scales, the masked layout's own where there is a limit;
                    needed there if ``quantize`` is
    """

    gemm: GemmBackend
    quantize: Quantizer | None
    swiglu_limit: float | None
    quantize_fused: Quantizer | None = None

    def run(self, rows: RunnerInput, experts: LoadedExperts, tap: Tap) -> Gemm2Output:
        """Expert outputs of every grouped row, unweighted; taps each of the three stages."""
        gate_up = self._multiply(rows, rows.hidden_states, rows.hidden_states_scale, experts.w13)
        first = tap(Stage.GEMM1, Gemm1Output(gate_up=gate_up))
        middle = tap(Stage.ACTIVATION, self._activate_live(rows, first.gate_up))
        output = self._multiply(rows, middle.hidden_states, middle.hidden_states_scale, experts.w2)
        return tap(Stage.GEMM2, Gemm2Output(output=output))

    def _multiply(
        self, rows: RunnerInput, lhs: Tensor, lhs_scale: Tensor | None, rhs: LoadedMatrix
    ) -> Tensor:
        """``lhs`` in the layout of ``rows``, each row with its expert."""
        match rows:
            case ContigInput():
                return self.gemm.grouped_gemm_nt_contig(lhs, lhs_scale, rhs, rows.m_indices)
            case MaskedInput():
                return self.gemm.grouped_gemm_nt_masked(lhs, lhs_scale, rhs, rows.masked_m)
            case _:
                assert_never(rows)

    def _activate_live(self, rows: RunnerInput, gate_up: Tensor) -> ActivationOutput:
        """Rows that hold a route, activated in their places; the others stay poison.

        Padding is never read, so no GEMM here need multiply it.
        """
        match rows:
            case ContigInput():
                live = self.activate(take_rows(gate_up, rows.live_rows))
                return _to_segments(live, rows.live_rows, gate_up.shape[0])
            case MaskedInput():
                num_slabs, height = gate_up.shape[:2]
                places = slab_rows(rows.masked_m, height)
                live = self.activate_masked(take_rows(gate_up.flatten(0, 1), places))
                return _to_slabs(live, places, num_slabs, height)
            case _:
                assert_never(rows)

    def activate(self, gate_up: Tensor) -> ActivationOutput:
        """Clamp, silu and multiply, round to bf16, then quantise where the recipe does.

        For rows [M, 2I] in the contiguous layout, and those of a dense expert.
        """
        return _quantized(silu_and_mul(gate_up, self.swiglu_limit), self.quantize)

    def activate_masked(self, gate_up: Tensor) -> ActivationOutput:
        """``activate`` as the masked layout's kernels round, for rows [M, 2I].

        Quantised recipes: with a limit straight from fp32; without one, silu is rounded to bf16
        before it is multiplied and rounded again. bf16 is rounded once, as in the other layout.
        """
        if self.quantize is None:
            return self.activate(gate_up)
        if self.swiglu_limit is None:
            return _quantized(silu_rounded_and_mul(gate_up), self.quantize)
        assert self.quantize_fused is not None, "the masked layout with a limit quantises from fp32"
        return _quantized(unrounded_silu_and_mul(gate_up, self.swiglu_limit), self.quantize_fused)


def _quantized(activation: Tensor, quantize: Quantizer | None) -> ActivationOutput:
    if quantize is None:
        return ActivationOutput(
            activation=activation, hidden_states=activation, hidden_states_scale=None
        )
    quantized = quantize(activation)
    return ActivationOutput(
        activation=activation,
        hidden_states=quantized.values,
        hidden_states_scale=quantized.scale,
    )


def _to_segments(live: ActivationOutput, places: Tensor, num_rows: int) -> ActivationOutput:
    """Live rows back in their places among ``num_rows``."""
    return _moved(
        live,
        lambda rows: spread_rows(rows, places, num_rows),
        lambda scale: spread_scales(scale, places, num_rows),
    )


def _to_slabs(
    live: ActivationOutput, places: Tensor, num_slabs: int, height: int
) -> ActivationOutput:
    """Live rows back in their places among the slabs."""
    return _moved(
        live,
        lambda rows: spread_slabs(rows, places, num_slabs, height),
        lambda scale: spread_slab_scales(scale, places, num_slabs, height),
    )


def _moved(
    live: ActivationOutput,
    move_rows: Callable[[Tensor], Tensor],
    move_scale: Callable[[Tensor], Tensor],
) -> ActivationOutput:
    activation = move_rows(live.activation)
    if live.hidden_states_scale is None:
        return ActivationOutput(
            activation=activation, hidden_states=activation, hidden_states_scale=None
        )
    return ActivationOutput(
        activation=activation,
        hidden_states=move_rows(live.hidden_states),
        hidden_states_scale=move_scale(live.hidden_states_scale),
    )

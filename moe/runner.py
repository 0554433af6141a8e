"""GEMM1, activation with quantisation, GEMM2, on rows in either grouped layout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from torch import Tensor

from moe.activation import ActivationStores, activate, stores_of
from moe.formats import GatedActivation, GemmLayout, ScaleFormat, Stage
from moe.gemm_backend import GemmBackend, LoadedMatrix
from moe.indices import slab_rows
from moe.quant.fp8 import GROUP_SIZE, QuantizedRows
from moe.quant.ue8m0 import tma_aligned
from moe.row_kernels import FusedActivation
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
    activation      what lies between the GEMMs
    scale_format    of quantised activations; NONE keeps bf16
    quantize        bf16 rows -> codes and scales between the GEMMs; None keeps bf16
    quantize_fused  the same for fp32 rows, where the kernel stores none in between
    input_group     columns that a scale covers in front of GEMM1
    middle_group    the same in front of GEMM2
    fused           activation and quantiser in one kernel; None: one step after the other
    """

    gemm: GemmBackend
    activation: GatedActivation
    scale_format: ScaleFormat
    quantize: Quantizer | None
    quantize_fused: Quantizer | None = None
    input_group: int = GROUP_SIZE
    middle_group: int = GROUP_SIZE
    fused: FusedActivation | None = None

    def run(self, rows: RunnerInput, experts: LoadedExperts, tap: Tap) -> Gemm2Output:
        """Expert outputs of every grouped row, unweighted; taps each of the three stages."""
        lhs, scale = rows.hidden_states, rows.hidden_states_scale
        gate_up = self._multiply(rows, lhs, scale, experts.w13, self.input_group)
        first = tap(Stage.GEMM1, Gemm1Output(gate_up=gate_up))
        middle = tap(Stage.ACTIVATION, self._activate_live(rows, first.gate_up))
        lhs, scale = middle.hidden_states, middle.hidden_states_scale
        output = self._multiply(rows, lhs, scale, experts.w2, self.middle_group)
        return tap(Stage.GEMM2, Gemm2Output(output=output))

    def _multiply(
        self,
        rows: RunnerInput,
        lhs: Tensor,
        lhs_scale: Tensor | None,
        rhs: LoadedMatrix,
        lhs_group: int,
    ) -> Tensor:
        """``lhs`` in the layout of ``rows``, each row with its expert."""
        scale = None if lhs_scale is None else tma_aligned(lhs_scale)
        match rows:
            case ContigInput():
                return self.gemm.grouped_gemm_nt_contig(lhs, scale, rhs, rows.m_indices, lhs_group)
            case MaskedInput():
                return self.gemm.grouped_gemm_nt_masked(lhs, scale, rhs, rows.masked_m, lhs_group)
            case _:
                assert_never(rows)

    def _activate_live(self, rows: RunnerInput, gate_up: Tensor) -> ActivationOutput:
        """Rows that hold a route, activated in their places; the others stay poison.

        Padding is never read, so no GEMM here need multiply it.
        """
        match rows:
            case ContigInput() if self.fused is not None:
                return self.fused.segments(gate_up, rows.live_rows)
            case MaskedInput() if self.fused is not None:
                return self.fused.slabs(gate_up, rows.masked_m)
            case ContigInput():
                live = self.activate(take_rows(gate_up, rows.live_rows), GemmLayout.CONTIG)
                return _to_segments(live, rows.live_rows, gate_up.shape[0])
            case MaskedInput():
                num_slabs, height = gate_up.shape[:2]
                places = slab_rows(rows.masked_m, height)
                live = self.activate(take_rows(gate_up.flatten(0, 1), places), GemmLayout.MASKED)
                return _to_slabs(live, places, num_slabs, height)
            case _:
                assert_never(rows)

    def activate(self, gate_up: Tensor, layout: GemmLayout) -> ActivationOutput:
        """The gated activation of rows [M, 2I], rounded as the layout's kernel does, quantised."""
        stores = stores_of(self.activation, layout, self.scale_format)
        fused = stores is ActivationStores.NONE
        quantize = self.quantize_fused if fused else self.quantize
        return _quantized(activate(gate_up, self.activation, stores), quantize)

    def activate_dense(self, gate_up: Tensor) -> ActivationOutput:
        """The same of a dense expert: its kernels store the product once, whatever the layout."""
        if self.fused is not None:
            return self.fused.dense(gate_up)
        stored = activate(gate_up, self.activation, ActivationStores.ONCE)
        middle = _quantized(stored, self.quantize)
        if middle.hidden_states_scale is None:
            return middle
        return replace(middle, hidden_states_scale=tma_aligned(middle.hidden_states_scale))


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
        hidden_states_scale=tma_aligned(move_scale(live.hidden_states_scale)),
    )

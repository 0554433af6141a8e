"""The comparisons that several stages share: a quantiser, a GEMM, a gated activation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.arithmetic import FP32_ROUNDOFF, compounded
from moe.formats import GatedActivation, ScaleFormat, Stage
from moe.golden import (
    GROUP_AMAX_FLOOR,
    Stores,
    Terms,
    gated,
    gated_as_stored,
    quantize_groups,
)
from moe.trace import StageTensors
from reports.verdict.band import (
    activation_noise,
    gemm_noise,
    once_stored,
    reciprocal_noise,
    stored_bf16,
    stored_fp32,
)
from reports.verdict.compared import check_kept, check_stored
from reports.verdict.deviation import Breach, Deviation
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows, take_rows
from reports.verdict.rules import check_quantiser

ACCOUNTS = "accounts"
CONTRACT = "contract"


def broken(
    ledger: Ledger,
    stage: Stage,
    rank: int,
    tensor: str,
    detail: str,
    *,
    token: int | None = None,
    slot: int | None = None,
    breach: Breach | None = None,
) -> None:
    """Enter a contract that does not hold."""
    ledger.report(
        Deviation(
            check=CONTRACT,
            stage=stage,
            rank=rank,
            tensor=tensor,
            detail=detail,
            token=token,
            slot=slot,
            breach=breach,
        )
    )


def product(lhs: Tensor, weight: Tensor) -> Terms:
    """``lhs @ weight.T`` in float64, [R, K] and [N, K], with magnitudes that bound the true ones.

    Magnitudes only scale bands, so they are summed in fp32 at half the cost and raised by what
    K roundings can take from them; infinite where an operand or a term overflows fp32.
    """
    magnitude = lhs.abs().to(torch.float32) @ weight.to(torch.float32).abs_().T
    raised = 1 + compounded(lhs.shape[1] + 2, FP32_ROUNDOFF)
    raised_magnitude = magnitude.to(torch.float64).mul_(raised)
    return Terms(value=lhs @ weight.T, magnitude=raised_magnitude.nan_to_num_(nan=torch.inf))


@dataclass(frozen=True, slots=True, eq=False)
class StageChecks:
    """Comparisons of one stage's rows, all of the same coordinates."""

    ledger: Ledger
    stage: Stage
    layer: JudgedLayer
    rows: Rows

    def quantised(
        self,
        tensor: str,
        values: Tensor,
        scale: Tensor | None,
        source: Tensor,
        amax_floor: float = GROUP_AMAX_FLOOR,
    ) -> None:
        """Codes and scales of ``source`` by the quantiser rule; where the recipe has none, a copy.

        Args:
            tensor: name in the trace.
            values: [R, C] e4m3 or bf16.
            scale: its scales, or None.
            source: [R, C] bf16 or fp32, the traced input of the quantiser.
            amax_floor: least magnitude that a group is scaled for.
        """
        scale_format, group_size = self.layer.scales_of(self.stage, tensor)
        if scale_format is ScaleFormat.NONE:
            self.ledger.moved(self.stage, tensor, self.rows, got=values, want=source)
            return
        if scale is None or values.dtype != torch.float8_e4m3fn:
            return  # a broken layout, and reported as one
        noise = 0.0
        if scale_format is ScaleFormat.FP32:
            # A quantiser fused to the activation multiplies by the reciprocal of its stored scale.
            fused = FP32_ROUNDOFF if source.dtype == torch.float32 else 0.0
            noise = reciprocal_noise(self.layer.arithmetic) + fused
        check_quantiser(
            self.ledger,
            self.stage,
            tensor,
            self.rows,
            values=values,
            scale=scale,
            want=quantize_groups(
                source.to(torch.float64), scale_format, group_size, amax_floor=amax_floor
            ),
            noise=noise,
        )

    def gemm(self, tensor: str, got: Tensor, want: Terms, terms: int) -> None:
        """A bf16 GEMM output against the golden's product of the traced operands.

        Args:
            tensor: name in the trace.
            got: [R, N] bf16.
            want: [R, N] golden sums and their magnitudes.
            terms: K.
        """
        noise = gemm_noise(want.magnitude, terms, self.layer.arithmetic)
        check_stored(
            self.ledger,
            self.stage,
            tensor,
            self.rows,
            got=got.to(torch.float64),
            want=want.value,
            noise=noise,
            signs_are_drawn=self.layer.draws_signs,
        )

    def activation(self, tensor: str, got: Tensor, gate_up: Tensor, stores: Stores) -> None:
        """The gated activation of the traced GEMM output, rounded as the layout's kernel does.

        Args:
            tensor: name in the trace.
            got: [R, I] bf16, or fp32 where the kernel quantises without a store in between.
            gate_up: [R, 2I] bf16, traced.
            stores: what that kernel stores.
        """
        want, noise = self._activation_due(gate_up.to(torch.float64), stores)
        where = self.ledger, self.stage, tensor, self.rows
        values = got.to(torch.float64)
        if stores is Stores.NOTHING:
            check_kept(*where, got=values, want=want, band=stored_fp32(want, noise))
        else:
            check_stored(*where, got=values, want=want, noise=noise)

    def activation_due(self, gate_up: Tensor, stores: Stores) -> tuple[Tensor, Tensor]:
        """([R, I] the golden's activation, its band), as the layout's kernel stores it."""
        want, noise = self._activation_due(gate_up.to(torch.float64), stores)
        is_stored = stores is not Stores.NOTHING
        return want, stored_bf16(want, noise) if is_stored else stored_fp32(want, noise)

    def _activation_due(self, gate_up: Tensor, stores: Stores) -> tuple[Tensor, Tensor]:
        """([R, I] the golden's activation, its error before a store)."""
        if stores is Stores.SILU_AND_PRODUCT:
            return self._silu_stored_first(gate_up)
        rule = self.layer.activation
        want = gated_as_stored(gate_up, rule, Stores.NOTHING)
        return want, activation_noise(gate_up, want, rule, self.layer.arithmetic)

    def _silu_stored_first(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """([R, I] silu(gate), stored, times up; its error before that is stored)."""
        gate, up = gate_up.chunk(2, dim=1)
        alone, silu_alone = torch.cat([gate, torch.ones_like(up)], dim=1), GatedActivation()
        silu = gated(alone, silu_alone)
        noise = activation_noise(alone, silu, silu_alone, self.layer.arithmetic)
        stored, width = once_stored(silu, noise)
        return stored * up, (width * up.abs()).nan_to_num()


def check_moved(
    checks: StageChecks, name: str, traced: StageTensors, source: StageTensors, index: Tensor
) -> None:
    """Codes and scales of ``traced`` are those of ``source`` at ``index``."""
    scale = f"{name}_scale"
    for tensor in (name, scale) if scale in traced else (name,):
        want = take_rows(source[tensor], index)
        checks.ledger.moved(checks.stage, tensor, checks.rows, got=traced[tensor], want=want)

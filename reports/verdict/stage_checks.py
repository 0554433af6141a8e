"""The comparisons that several stages share: a quantiser, a GEMM, a gated activation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.arithmetic import FP32_ROUNDOFF, compounded
from moe.formats import ScaleFormat, Stage
from moe.golden import Terms, gated_silu, quantize_groups, round_bf16
from reports.verdict.band import gemm_noise, reciprocal_noise, silu_noise, stored_bf16
from reports.verdict.ledger import Ledger
from reports.verdict.rules import check_quantiser
from reports.verdict.subject import JudgedLayer, Rows

BAND = "band"


def product(lhs: Tensor, weight: Tensor) -> Terms:
    """``lhs @ weight.T`` in float64, [R, K] and [N, K], with magnitudes that bound the true ones.

    Magnitudes only scale bands, so they are summed in fp32 at half the cost and raised by what
    K roundings can take from them.
    """
    magnitude = lhs.abs().to(torch.float32) @ weight.to(torch.float32).abs_().T
    raised = 1 + compounded(lhs.shape[1] + 2, FP32_ROUNDOFF)
    return Terms(value=lhs @ weight.T, magnitude=magnitude.to(torch.float64).mul_(raised))


@dataclass(frozen=True, slots=True, eq=False)
class StageChecks:
    """Comparisons of one stage's rows, all of the same coordinates."""

    ledger: Ledger
    stage: Stage
    layer: JudgedLayer
    rows: Rows

    def quantised(self, tensor: str, values: Tensor, scale: Tensor | None, source: Tensor) -> None:
        """Codes and scales of ``source`` by the quantiser rule; where the recipe has none, a copy.

        Args:
            tensor: name in the trace.
            values: [R, C] e4m3 or bf16.
            scale: its scales, or None.
            source: [R, C] bf16, the traced input of the quantiser.
        """
        if self.layer.scale_format is ScaleFormat.NONE:
            self.ledger.moved(self.stage, tensor, self.rows, got=values, want=source)
            return
        if scale is None or values.dtype != torch.float8_e4m3fn:
            return  # a broken layout, and reported as one
        exact = self.layer.scale_format is ScaleFormat.UE8M0
        check_quantiser(
            self.ledger,
            self.stage,
            tensor,
            self.rows,
            values=values,
            scale=scale,
            want=quantize_groups(source.to(torch.float64), self.layer.scale_format),
            noise=0.0 if exact else reciprocal_noise(self.layer.arithmetic),
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
        self.ledger.cells(
            BAND,
            self.stage,
            tensor,
            self.rows,
            got=got.to(torch.float64),
            want=want.value,
            band=stored_bf16(want.value, noise),
        )

    def activation(self, tensor: str, got: Tensor, gate_up: Tensor) -> None:
        """Clamp, silu and product of the traced GEMM output, stored as bf16.

        Args:
            tensor: name in the trace.
            got: [R, I] bf16.
            gate_up: [R, 2I] bf16, traced.
        """
        source = gate_up.to(torch.float64)
        want = gated_silu(source, self._limit())
        noise = silu_noise(source, want, self.layer.arithmetic)
        self.ledger.cells(
            BAND,
            self.stage,
            tensor,
            self.rows,
            got=got.to(torch.float64),
            want=want,
            band=stored_bf16(want, noise),
        )

    def _limit(self) -> float | None:
        """The clamp as the kernels compare it: in bf16."""
        limit = self.layer.swiglu_limit
        return limit and float(round_bf16(torch.tensor(limit, dtype=torch.float64)))

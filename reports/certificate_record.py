"""What a result says of exact mode's certificate."""

from typing import Literal

from pydantic import BaseModel, NonNegativeInt, PositiveInt

from moe.formats import Stage
from reports.json_types import RECORD, Items, JsonFloat


class CertifiedStage(BaseModel):
    """Cells of one stage, of all tensors that are compared there."""

    model_config = RECORD

    stage: Stage
    certified: JsonFloat
    """Share that can hold one value only."""
    void: JsonFloat
    """Share that is certified and an ideal zero: a fault that scales cannot show there."""


class CertifiedSum(BaseModel):
    """One kind of sum: the worst of its cells."""

    model_config = RECORD

    stage: Stage
    name: str
    bits: NonNegativeInt
    """That the narrowest sum of this kind keeps."""
    quantum: JsonFloat
    """Every term of the worst cell is a multiple of it."""
    largest: JsonFloat
    """The sum of |terms| of that cell."""
    margin_bits: JsonFloat
    """Bits left over: ``bits - log2(largest / quantum)``; negative where order matters."""
    certified: JsonFloat
    """Share of the sums that have one value in every order."""


class Certificate(BaseModel):
    """What exact mode could prove about its inputs, before anything was compared."""

    model_config = RECORD

    stages: Items[CertifiedStage]
    sums: Items[CertifiedSum]
    round: NonNegativeInt
    """Which round it is of: the first that was refused, or else the first."""
    least_condition: str | None
    """The condition that fewest of its cells fulfil; null: every cell fulfils all."""
    least_share: JsonFloat
    same_topology_only: bool
    """A remark: the routed scaling factor makes each rank's stored sum a rounding of its own, so
    another topology may answer otherwise. No check depends on it: `compare` takes the ranks' stores
    as declared rounding points whatever the factor."""
    patterns: dict[str, JsonFloat]
    """Share of the routes by what their expert exercises."""
    accumulator_bits: dict[str, PositiveInt]
    """That the GEMM backend's sums keep, inside a block of 128 columns and across blocks."""
    accumulator_bits_are: Literal["measured", "declared"]
    """Measured of the backend that ranks multiply with, in the driver's process; declared of one
    that computed elsewhere."""
    smallest_relative_effect: JsonFloat
    """Half a bf16 ulp: less vanishes at the next store."""
    refusal: str | None = None
    """Why the exact check was not asked of this round; null: it was."""

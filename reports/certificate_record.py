"""What a result says of exact mode's certificate."""

from pydantic import BaseModel, PositiveInt

from moe.formats import Stage
from reports.json_types import RECORD, Items, JsonFloat


class CertifiedStage(BaseModel):
    """Cells of one stage, in canonical coordinates."""

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
    bits: PositiveInt
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
    least_condition: str
    """The condition that fewest of its cells fulfil."""
    least_share: JsonFloat
    same_topology_only: bool
    """The routed scaling factor makes each rank's stored sum a rounding of its own, so another
    topology may answer otherwise."""
    patterns: dict[str, JsonFloat]
    """Share of the routes by what their expert exercises."""
    accumulator_bits: dict[str, PositiveInt]
    """Measured of the GEMM backend's sums, inside a block of 128 columns and across blocks."""
    smallest_relative_effect: JsonFloat
    """Half a bf16 ulp: less vanishes at the next store."""
    refusal: str | None = None
    """Why the exact check was not asked; null: it was."""

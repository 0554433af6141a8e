"""Everything a rank needs to know, as plain values that travel to any process."""

import hashlib
from dataclasses import dataclass

from moe.formats import DispatchFormat, QuantRecipe, RunnerBackend, ScaleFormat
from moe.routing import RoutingRule
from moe.weights import WeightSource
from topology.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One layer under one topology, every ``auto`` resolved.

    tokens         rows of each attention-DP group
    scale_format   of activations and prepared weights; NONE for bf16
    row_alignment  rows to which an expert's segment is padded
    seed           decides what a contract leaves open, such as arrival order
    """

    layout: ParallelLayout
    tokens: tuple[int, ...]
    num_experts: int
    routing: RoutingRule
    dispatch_format: DispatchFormat
    runner: RunnerBackend
    recipe: QuantRecipe
    scale_format: ScaleFormat
    row_alignment: int
    swiglu_limit: float | None
    routed_scaling_factor: float
    weights: WeightSource
    seed: int

    def fingerprint(self) -> int:
        """Equal on two ranks exactly when they were given the same plan."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")

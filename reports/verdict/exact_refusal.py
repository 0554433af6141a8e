"""Why the inputs of a forward could not be certified, and what to change so that they can."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

LEAST_SHARE: Final = 0.9
"""Of the output's cells: with fewer certified the check says too little, and the band judges."""

_SUM = (
    "a sum that is stored as bf16 has 8 bits: moe.shared_experts says whether the shared expert "
    "is in it, and model.overrides.routed_scaling_factor takes bits where it is no power of two"
)
_FACTOR = "a factor that is no power of two: set model.overrides.routed_scaling_factor"
_ACTIVATION = (
    "the model's activation leaves no multiple of a power of two, as a tanh does: "
    "model.overrides.hidden_act names another"
)
_INPUTS = "tokens or weights are not those that inputs.modes: [exact] draws"

REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tokens' codes round alike": _INPUTS,
        "gemm1 sums": "a GEMM backend of few bits: see accumulator_bits",
        "gemm1 stores one value": _INPUTS,
        "activation has one value": _ACTIVATION,
        "activations' codes round alike": _ACTIVATION,
        "gemm2 sums": "a GEMM backend of few bits, or activations of many",
        "gemm2 stores one value": _ACTIVATION,
        "partial sums": _SUM,
        "weighted sums": "routes of many bits: see the conditions of gemm2",
        "a rank's stored sum is one value": _FACTOR,
        "sums over ranks": _FACTOR,
        "output stores one value": _FACTOR,
    }
)
"""Condition -> what keeps cells from fulfilling it, and the key that changes it."""


def refused(certified: float, condition: str | None, share: float) -> str | None:
    """Why so few certified cells of the output are not enough; None: they are.

    Args:
        certified: share of the output.
        condition: that fewest cells fulfil, of ``REMEDIES``; None: all fulfil all.
        share: of the cells that do.
    """
    if certified >= LEAST_SHARE:
        return None
    few = f"{certified:.1%} of the output is certified, {LEAST_SHARE:.0%} are needed"
    if condition is None:
        return f"{few}: prepared weights are not those that `inputs.modes: [exact]` draws"
    return (
        f"{few}; the condition that fewest cells fulfil: {condition} ({share:.1%}): "
        f"{REMEDIES[condition]}"
    )

"""The golden model: one device, float64, one formula; it judges every other implementation.

It imports nothing of the project but ``moe.formats``, so a mistake in the pipeline's arithmetic
cannot repeat itself here. ``forward`` is the whole layer, ``model`` what goes into it and comes
out, ``path`` where ranks round, ``routing`` the router, ``mlp`` one expert, ``rank_sums`` the sums
over ranks, ``stages`` the arithmetic of the other stages with the sum of its |terms|, ``quantize``
the recipes' quantisers, ``number_formats`` the codes.
"""

from moe.golden.forward import golden_forward
from moe.golden.model import GoldenModel, GoldenTrace, GoldenWeights
from moe.golden.number_formats import (
    E4M3_MAX,
    decode_e4m3,
    decode_ue8m0,
    round_bf16,
    round_e4m3,
    unpack_ue8m0,
)
from moe.golden.path import PartialStores, RoundingPath, SharedInSum
from moe.golden.quantize import (
    GROUP_AMAX_FLOOR,
    LOW_LATENCY_AMAX_FLOOR,
    Quantized,
    QuantizedBlocks,
    quantize_blocks,
    quantize_groups,
    requantize_weight,
)
from moe.golden.routing import (
    GoldenRouting,
    Routes,
    route_weights,
    router_scores,
    select_experts,
)
from moe.golden.stages import (
    Terms,
    gated_silu,
    linear,
    tail,
    weighted_sum,
)

__all__ = [
    "E4M3_MAX",
    "GROUP_AMAX_FLOOR",
    "LOW_LATENCY_AMAX_FLOOR",
    "GoldenModel",
    "GoldenRouting",
    "GoldenTrace",
    "GoldenWeights",
    "PartialStores",
    "Quantized",
    "QuantizedBlocks",
    "RoundingPath",
    "Routes",
    "SharedInSum",
    "Terms",
    "decode_e4m3",
    "decode_ue8m0",
    "gated_silu",
    "golden_forward",
    "linear",
    "quantize_blocks",
    "quantize_groups",
    "requantize_weight",
    "round_bf16",
    "round_e4m3",
    "route_weights",
    "router_scores",
    "select_experts",
    "tail",
    "unpack_ue8m0",
    "weighted_sum",
]

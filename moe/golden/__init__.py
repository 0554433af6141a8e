"""The golden model: one device, float64, one formula; it judges every other implementation.

It imports nothing of the project but ``moe.formats``, so a mistake in the pipeline's arithmetic
cannot repeat itself here. ``forward`` is the whole layer, ``model`` what goes into it and comes
out, ``path`` where ranks round, ``routing`` the router, ``mlp`` one expert, ``activations`` its
gate, ``rank_sums`` the sums over ranks, ``stages`` the arithmetic of the other stages with the sum
of its |terms|, ``quantize`` the recipes' quantisers, ``mx`` weights in groups of 32,
``number_formats`` the codes.
"""

from moe.golden.activations import (
    Stores,
    clamped,
    gated,
    gated_as_stored,
    stores_of,
)
from moe.golden.forward import golden_forward
from moe.golden.model import (
    GoldenModel,
    GoldenTokens,
    GoldenTrace,
    GoldenWeights,
    activation_group,
    middle_group,
    shared_recipe,
    wire_group,
)
from moe.golden.mx import (
    decode_mxfp4,
    decode_mxfp8,
    fp4_as_fp8,
    quantize_mxfp4_weight,
    quantize_mxfp8_weight,
)
from moe.golden.number_formats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    round_bf16,
    round_e2m1,
    round_e4m3,
    round_ue8m0_up,
    unpack_ue8m0,
)
from moe.golden.path import PartialStores, RoundingPath, SharedInSum
from moe.golden.quantize import (
    GROUP_AMAX_FLOOR,
    LOW_LATENCY_AMAX_FLOOR,
    Quantized,
    QuantizedBlocks,
    merge_per_tensor,
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
    linear,
    tail,
    weighted_sum,
)

__all__ = [
    "E2M1_MAX",
    "E4M3_MAX",
    "GROUP_AMAX_FLOOR",
    "LOW_LATENCY_AMAX_FLOOR",
    "GoldenModel",
    "GoldenRouting",
    "GoldenTokens",
    "GoldenTrace",
    "GoldenWeights",
    "PartialStores",
    "Quantized",
    "QuantizedBlocks",
    "RoundingPath",
    "Routes",
    "SharedInSum",
    "Stores",
    "Terms",
    "activation_group",
    "clamped",
    "decode_e2m1",
    "decode_e4m3",
    "decode_mxfp4",
    "decode_mxfp8",
    "decode_ue8m0",
    "fp4_as_fp8",
    "gated",
    "gated_as_stored",
    "golden_forward",
    "linear",
    "merge_per_tensor",
    "middle_group",
    "quantize_blocks",
    "quantize_groups",
    "quantize_mxfp4_weight",
    "quantize_mxfp8_weight",
    "requantize_weight",
    "round_bf16",
    "round_e2m1",
    "round_e4m3",
    "round_ue8m0_up",
    "route_weights",
    "router_scores",
    "select_experts",
    "shared_recipe",
    "stores_of",
    "tail",
    "unpack_ue8m0",
    "weighted_sum",
    "wire_group",
]

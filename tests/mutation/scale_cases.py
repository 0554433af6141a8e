"""Where each fault of quantisers and scales acts, and what the verdict has to name first."""

from moe.formats import Stage
from tests.mutation.cases import Case

ACTIVATED = "stage=activation"
FOUR_GROUPS = ("model.overrides.moe_intermediate_size=512",)
ONE_GROUP = ("model.overrides.hidden_size=128",)

SCALES_FOUND = (
    Case("scales_rounded_up_late", "scales", Stage.ACTIVATION, 0),
    Case("scales_rounded_up_late", "slabs", Stage.ACTIVATION, 0),
    Case("scales_rounded_up_late", "experts situ", Stage.ACTIVATION, 0),
    Case("low_latency_scales_rounded_up:rank=2", "scales ll sm120", Stage.PRE_PERMUTE, 2),
    Case("pack_mantissa_leak", "scales", Stage.ACTIVATION, 2),
    Case("pack_mantissa_leak", "slabs", Stage.ACTIVATION, 1),
    Case("pack_mantissa_leak_2d", "scales", Stage.WEIGHTS, 2),
    Case("pow2_log2_inexact", "scales of tensors", Stage.WEIGHTS, 2),
    Case("pow2_log2_inexact", "slabs", Stage.WEIGHTS, 1),
    Case("amax_floor_dropped", "v2", Stage.DISPATCH, 2, moves=True),
    Case("scale_inverted", "scales", Stage.ACTIVATION, 2),
    Case("scale_inverted", "a2a fp32 scales", Stage.ACTIVATION, 2),
    Case("scale_inverted:stage=pre_permute", "slabs", Stage.PRE_PERMUTE, 1),
    Case("scale_col_coarse", "scales mx", Stage.WEIGHTS, 2),
    Case("scale_col_coarse", "experts mxfp4", Stage.WEIGHTS, 2),
    Case("dispatch_scale_stride_pad", "v2", Stage.DISPATCH, 2),
    Case("dispatch_scale_stride_pad", "slabs ll", Stage.DISPATCH, 2),
    Case("scales_in_wrong_layout", "scales mx", Stage.PRE_PERMUTE, 2),
    Case(f"scales_in_wrong_layout:{ACTIVATED}", "scales mx", Stage.ACTIVATION, 2),
    Case(
        f"scales_in_wrong_layout:{ACTIVATED}",
        "a2a fp32 scales",
        Stage.ACTIVATION,
        2,
        FOUR_GROUPS,
    ),
    Case("split_scale_not_padded", "v2", Stage.PRE_PERMUTE, 2),
    Case("split_scale_not_padded", "scattered", Stage.PRE_PERMUTE, 2),
    Case("split_scale_not_padded", "a2a fp32 scales", Stage.PRE_PERMUTE, 2),
    Case("scale_of_next_block", "scales", Stage.ACTIVATION, 2),
    Case("scale_of_next_block", "a2a fp32 scales", Stage.ACTIVATION, 2, FOUR_GROUPS),
    Case("scale_of_next_row", "scales mx", Stage.ACTIVATION, 2),
    Case("scale_of_next_row", "a2a fp32 scales", Stage.ACTIVATION, 2),
    Case("fp32_scale_read_as_packed", "scales of tensors", Stage.WEIGHTS, 2),
    Case("fp32_scale_read_as_packed", "scales mx", Stage.WEIGHTS, 2),
    Case("fp32_scale_unpacked_read", "scales", Stage.ACTIVATION, 2),
    Case("fp32_scale_unpacked_read:stage=pre_permute", "scales mx", Stage.PRE_PERMUTE, 2),
    Case("ue8m0_flag_dropped", "slabs ll", Stage.DISPATCH, 0, moves=True),
    Case("dispatch_scale_flag_disagrees", "scales ll fp32", Stage.DISPATCH, 0),
    Case("dispatch_scale_flag_disagrees", "a2a fp32 scales", Stage.DISPATCH, 0),
)

SCALES_VOID = (
    Case("scales_rounded_up_late", "a2a fp32 scales", Stage.ACTIVATION, 0),
    Case("low_latency_scales_rounded_up", "slabs ll", Stage.PRE_PERMUTE, 0),
    Case("pack_mantissa_leak", "a2a fp32 scales", Stage.ACTIVATION, 2),
    Case("pack_mantissa_leak_2d", "scales mx", Stage.WEIGHTS, 2),
    Case("pow2_log2_inexact", "scales mx", Stage.WEIGHTS, 2),
    Case("amax_floor_dropped", "a2a", Stage.DISPATCH, 2),
    Case("scale_inverted", "a2a bf16", Stage.ACTIVATION, 2),
    Case("scale_inverted:stage=weights", "a2a", Stage.WEIGHTS, 2),
    Case("scale_col_coarse", "a2a", Stage.WEIGHTS, 2),
    Case("dispatch_scale_stride_pad", "scales mx", Stage.DISPATCH, 2),
    Case("scales_in_wrong_layout", "a2a", Stage.PRE_PERMUTE, 2),
    Case("split_scale_not_padded", "slabs", Stage.PRE_PERMUTE, 1),
    Case("scale_of_next_block", "a2a", Stage.ACTIVATION, 2),
    Case("scale_of_next_row", "a2a bf16", Stage.ACTIVATION, 2),
    Case("fp32_scale_read_as_packed", "a2a fp32 scales", Stage.WEIGHTS, 2),
    Case("fp32_scale_unpacked_read", "a2a fp32 scales", Stage.ACTIVATION, 2),
    Case("ue8m0_flag_dropped", "scales ll fp32", Stage.DISPATCH, 0),
    Case("dispatch_scale_flag_disagrees", "slabs ll", Stage.DISPATCH, 0),
)

OF_CODES = frozenset(
    {"scales_rounded_up_late", "low_latency_scales_rounded_up", "amax_floor_dropped"}
)
"""Faults whose codes are wrong; the scales of the others are."""

OF_FORM = frozenset({"ue8m0_flag_dropped"})
"""Faults that leave every value as it is, in a form that is not due."""

"""Where faults of activations, of reading checkpoints and of padded experts act."""

from moe.formats import Stage
from tests.mutation.cases import Case

FP32_SCALES = ("moe.recipe=mxfp4_as_fp8", "platform=sm90")
OAI = "limit=7.0,alpha=1.702"

EXPERTS_FOUND = (
    Case("requant_skipped", "a2a", Stage.WEIGHTS, 0),
    Case("requant_skipped:rank=3", "slabs", Stage.WEIGHTS, 3),
    Case("requant_wrong_attr:rank=2", "a2a", Stage.WEIGHTS, 2),
    Case("requant_wrong_attr", "tp", Stage.WEIGHTS, 0),
    Case("requant_without_pow2:rank=1", "a2a", Stage.WEIGHTS, 1),
    Case("per_tensor_scale_of_gate_for_up:rank=1", "experts per tensor", Stage.WEIGHTS, 1),
    Case("fp4_nibbles_swapped:rank=2", "experts mxfp4", Stage.WEIGHTS, 2),
    Case("fp4_nibbles_swapped:rank=2", "experts mxfp4 as fp8", Stage.WEIGHTS, 2),
    Case("fp4_scale_group_of_128:rank=2", "experts mxfp4", Stage.WEIGHTS, 2),
    Case("fp4_scale_group_of_128:rank=3", "experts oai", Stage.WEIGHTS, 3),
    Case("packed_scale_sent_raw_expected", "v2", Stage.WEIGHTS, 2),
    Case("packed_scale_sent_raw_expected", "experts mxfp8", Stage.WEIGHTS, 2),
    Case("gate_up_interleave_mismatch", "a2a", Stage.WEIGHTS, 2),
    Case("gate_up_interleave_mismatch", "experts mxfp4", Stage.WEIGHTS, 2),
    Case("stale_scale_after_reload", "a2a fp32 scales", Stage.WEIGHTS, 2),
    Case("stale_scale_after_reload:expert=1", "experts mxfp8", Stage.WEIGHTS, 2),
    Case("padded_rows_loaded", "experts oai", Stage.WEIGHTS, 2, FP32_SCALES),
    Case("padded_columns_filled", "experts oai in segments", Stage.DISPATCH, 2),
    Case("padded_columns_filled", "experts oai", Stage.DISPATCH, 2, moves=True),
    Case("routed_no_clamp", "a2a", Stage.ACTIVATION, 2),
    Case("routed_no_clamp", "slabs ll", Stage.ACTIVATION, 2),
    Case("routed_no_clamp", "experts mxfp8", Stage.ACTIVATION, 2),
    Case(f"routed_no_clamp:{OAI}", "experts oai", Stage.ACTIVATION, 2),
    Case("clamp_after_product", "a2a", Stage.ACTIVATION, 2),
    Case(f"clamp_after_product:{OAI}", "experts oai in segments", Stage.ACTIVATION, 2),
    Case("activation_plain_silu", "a2a", Stage.ACTIVATION, 2),
    Case("activation_plain_silu", "experts oai in segments", Stage.ACTIVATION, 2),
    Case("activation_plain_silu", "experts situ", Stage.ACTIVATION, 2),
    Case("up_without_one", "experts oai", Stage.ACTIVATION, 2),
    Case("situ_tan", "experts situ", Stage.ACTIVATION, 2),
    Case("shared_no_clamp", "a2a", Stage.TAIL, 2),
    Case("shared_no_clamp", "slabs", Stage.TAIL, 1),
    Case("shared_no_clamp", "scattered shards", Stage.TAIL, 2),
)

EXPERTS_VOID = (
    Case("requant_skipped", "a2a fp32 scales", Stage.WEIGHTS, 0),
    Case("requant_wrong_attr", "experts mxfp4 as fp8", Stage.WEIGHTS, 0),
    Case("requant_without_pow2", "a2a bf16", Stage.WEIGHTS, 0),
    Case("per_tensor_scale_of_gate_for_up", "a2a", Stage.WEIGHTS, 0),
    Case("fp4_nibbles_swapped", "experts mxfp8", Stage.WEIGHTS, 0),
    Case("fp4_scale_group_of_128", "a2a", Stage.WEIGHTS, 0),
    Case("packed_scale_sent_raw_expected", "a2a fp32 scales", Stage.WEIGHTS, 2),
    Case("stale_scale_after_reload", "a2a bf16", Stage.WEIGHTS, 2),
    Case("padded_rows_loaded", "experts mxfp4", Stage.WEIGHTS, 2),
    Case("padded_columns_filled", "a2a", Stage.DISPATCH, 2),
    Case("routed_no_clamp", "tp", Stage.ACTIVATION, 1),
    Case("routed_no_clamp", "experts oai", Stage.ACTIVATION, 2),
    Case("routed_no_clamp:limit=100.0", "a2a", Stage.ACTIVATION, 2),
    Case("clamp_after_product", "experts situ", Stage.ACTIVATION, 2),
    Case("activation_plain_silu", "tp", Stage.ACTIVATION, 1),
    Case("up_without_one", "a2a", Stage.ACTIVATION, 2),
    Case("situ_tan", "experts oai", Stage.ACTIVATION, 2),
    Case("shared_no_clamp", "tp", Stage.TAIL, 1),
    Case("shared_no_clamp:limit=100.0", "a2a", Stage.TAIL, 2),
)

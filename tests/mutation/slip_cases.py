"""Where faults of the router's edge, of exchanges, races, tiles and judges act."""

from moe.formats import Stage
from tests.mutation.cases import THRICE, UNEVEN_VECTORS, Case, routing

SLIPS_FOUND = (
    Case("scaling_factor_in_router", "a2a", Stage.ROUTE, 2),
    Case("scaling_factor_in_router", "tp", Stage.ROUTE, 1),
    Case("renormalized_without_guard", "a2a of halves", Stage.ROUTE, 3, moves=True),
    Case("nan_scores", "a2a", Stage.ROUTE, 2),
    Case("nan_scores:row=2", "slabs", Stage.ROUTE, 1),
    Case("masked_groups_score_zero", "a2a of halves", Stage.ROUTE, 1, routing("all_negative")),
    Case("expert_chosen_twice", "a2a", Stage.ROUTE, 2),
    Case("expert_chosen_twice", "ep and tp", Stage.ROUTE, 1),
    Case("hash_of_next_entry", "hashed", Stage.ROUTE, 2),
    Case("padding_mask_rolled", "a2a of halves", Stage.ROUTE, 3),
    Case("slab_counts_wrap", "slabs ll", Stage.DISPATCH, 2),
    Case("weights_sent_in_bf16", "a2a", Stage.DISPATCH, 2),
    Case("weights_sent_in_bf16", "flashinfer decode", Stage.DISPATCH, 2),
    Case("chunks_of_next_rank", "scattered", Stage.GLUE_IN, 2),
    Case("chunks_of_next_rank", "a2a of chunks", Stage.GLUE_OUT, 1),
    Case("partial_doubled", "a2a", Stage.COMBINE, 2),
    Case("partial_doubled", "slabs ll", Stage.COMBINE, 2),
    Case("partial_of_another_rank", "a2a", Stage.COMBINE, 2),
    Case("partial_of_another_rank", "v2", Stage.COMBINE, 2),
    Case("summand_doubled", "tp", Stage.TAIL, 0),
    Case("summand_doubled:occurrence=1", "summed in the tail", Stage.TAIL, 0),
    Case("reduced_sum_stale", "tp", Stage.TAIL, 1, THRICE),
    Case("reduced_sum_stale", "summed in the tail", Stage.TAIL, 1, THRICE),
    Case("combine_rows_raced", "a2a", Stage.COMBINE, 2),
    Case("combine_rows_raced:p=1.0", "slabs ll", Stage.COMBINE, 2),
    Case("tile_of_next_block", "a2a", Stage.GEMM1, 2),
    Case("tile_of_next_block:stage=gemm2", "slabs", Stage.GEMM2, 1),
    Case("odd_block_unwritten", "a2a", Stage.GEMM2, 2, UNEVEN_VECTORS),
    Case("shared_expert_split", "a2a", Stage.TAIL, 2),
    Case("shared_expert_split", "scattered shards", Stage.TAIL, 2),
    Case("topk_weights_missing", "a2a", Stage.POST_PERMUTE, 2),
    Case("combine_weights_missing", "slabs ll", Stage.POST_PERMUTE, 2),
    Case("scale_of_first_block", "scales", Stage.ACTIVATION, 2),
    Case("scale_of_first_block:stage=pre_permute", "scales mx", Stage.PRE_PERMUTE, 2),
)

SLIPS_FAILED = (
    Case("idle_rank_leaves", "a2a", Stage.DISPATCH, 1),
    Case("idle_rank_leaves", "v2", Stage.DISPATCH, 1),
)

SLIPS_VOID = (
    Case("scaling_factor_in_router:factor=1.0", "a2a", Stage.ROUTE, 2),
    Case("renormalized_without_guard", "a2a", Stage.ROUTE, 2),
    Case("masked_groups_score_zero", "a2a", Stage.ROUTE, 2),
    Case("hash_of_next_entry", "a2a", Stage.ROUTE, 2),
    Case("padding_mask_rolled", "a2a", Stage.ROUTE, 2),
    Case("slab_counts_wrap:bound=64", "slabs ll", Stage.DISPATCH, 2),
    Case("slab_counts_wrap", "v2 expanded", Stage.DISPATCH, 2),
    Case("weights_sent_in_bf16", "slabs ll", Stage.DISPATCH, 2),
    Case("weights_sent_in_bf16", "tp", Stage.DISPATCH, 1),
    Case("idle_rank_leaves", "tp", Stage.DISPATCH, 0),
    Case("reduced_sum_stale", "a2a", Stage.TAIL, 2, THRICE),
    Case("combine_rows_raced", "scattered", Stage.COMBINE, 2),
    Case("odd_block_unwritten", "a2a", Stage.GEMM2, 2),
    Case("shared_expert_split", "tp", Stage.TAIL, 1),
    Case("topk_weights_missing", "tp", Stage.POST_PERMUTE, 1),
    Case("topk_weights_missing", "slabs ll", Stage.POST_PERMUTE, 2),
    Case("combine_weights_missing", "v2", Stage.POST_PERMUTE, 2),
    Case("scale_of_first_block", "a2a", Stage.ACTIVATION, 2),
)

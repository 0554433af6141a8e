"""Where each fault acts, and what the verdict has to name first."""

from dataclasses import dataclass

from moe.formats import Stage


@dataclass(frozen=True)
class Case:
    """A fault in a world, and the stage and rank of its first divergence.

    sets   what the fault needs besides, such as a routing
    moves  it changes bookkeeping and no token: the output stays the same in every bit
    """

    fault: str
    world: str
    stage: Stage
    rank: int
    sets: tuple[str, ...] = ()
    moves: bool = False

    def __str__(self) -> str:
        return f"{self.fault} in {self.world}"


def routing(kind: str) -> tuple[str, ...]:
    return (f"batch.routing.kind={kind}",)


SHUFFLED = ("moe.placement=shuffled",)
REPLICAS = ("moe.redundant_experts=4",)
FEW_ROUTES = ("batch.tokens=[1, 0, 2, 1]", "model.overrides.num_experts_per_tok=2")

THRICE = ("run.rounds=3",)
TOP_TWO = ("model.overrides.num_experts_per_tok=2",)
UNEVEN_VECTORS = ("model.overrides.hidden_size=384",)
FULL_SEGMENTS = (
    "batch.tokens=[32]",
    "model.overrides.num_experts_per_tok=8",
    "platform=sm100",  # segments in steps of 32 rows
)

FOUND = (
    Case("gate_up_swapped", "a2a", Stage.WEIGHTS, 2),
    Case("gate_up_swapped", "slabs", Stage.WEIGHTS, 1),
    Case("experts_strided:rank=1", "a2a of chunks", Stage.WEIGHTS, 1),
    Case("experts_strided", "ep and tp", Stage.WEIGHTS, 0),
    Case("placement_ignored:rank=3", "a2a", Stage.WEIGHTS, 3, SHUFFLED),
    Case("placement_ignored:rank=2", "scattered", Stage.WEIGHTS, 2, SHUFFLED),
    Case("redundant_experts_not_counted", "a2a of chunks", Stage.WEIGHTS, 1, REPLICAS),
    Case("replica_left_behind", "a2a of chunks", Stage.WEIGHTS, 2, REPLICAS),
    Case("token_shard_shifted", "a2a of chunks", Stage.GLUE_IN, 1),
    Case("first_chunk_for_all", "scattered", Stage.GLUE_IN, 2),
    Case("first_chunk_for_all", "a2a of chunks", Stage.GLUE_OUT, 1),
    Case("chunks_read_as_equal", "scattered", Stage.GLUE_IN, 2),
    Case("chunks_read_as_equal", "a2a of chunks", Stage.GLUE_OUT, 1),
    Case("zigzag_undone", "cp", Stage.GLUE_IN, 1),
    Case("weights_from_biased_scores", "a2a", Stage.ROUTE, 2),
    Case("weights_from_biased_scores", "a2a of halves", Stage.ROUTE, 1),
    Case("group_scored_by_best", "a2a of halves", Stage.ROUTE, 1),
    Case("expert_groups_ignored:rank=2", "a2a of halves", Stage.ROUTE, 2),
    Case("ties_to_highest_id", "a2a", Stage.ROUTE, 2, routing("ties")),
    Case("ties_to_highest_id", "ep and tp", Stage.ROUTE, 1, routing("ties")),
    Case("maximum_starts_at_zero", "a2a", Stage.ROUTE, 2, routing("all_negative")),
    Case("masked_by_local_count", "summed in the tail", Stage.ROUTE, 1),
    Case("masked_by_local_count", "cp", Stage.ROUTE, 1),
    Case("renormalization_flipped:rank=3", "a2a", Stage.ROUTE, 3),
    Case("renormalization_flipped:rank=1", "ep and tp", Stage.ROUTE, 1),
    Case("padding_rows_routed", "a2a of halves", Stage.ROUTE, 3),
    Case("tokens_swapped", "a2a", Stage.DISPATCH, 2),
    Case("tokens_swapped", "slabs", Stage.DISPATCH, 1),
    Case("tokens_swapped", "slabs ll", Stage.DISPATCH, 2),
    Case("tokens_swapped", "v2 expanded", Stage.DISPATCH, 2),
    Case("tokens_swapped", "flashinfer decode", Stage.DISPATCH, 2),
    Case("local_ids_left_global", "a2a", Stage.DISPATCH, 2),
    Case("local_ids_left_global:rank=3", "ep and tp", Stage.DISPATCH, 3),
    Case("local_ids_left_global", "v2", Stage.DISPATCH, 2),
    Case("local_ids_left_global", "flashinfer extend", Stage.DISPATCH, 2),
    Case("no_upper_bound_on_local_id", "summed in the tail", Stage.DISPATCH, 1),
    Case("no_upper_bound_on_local_id", "slabs", Stage.DISPATCH, 1),
    Case("absent_route_is_num_experts", "a2a", Stage.DISPATCH, 2),
    Case("absent_route_is_num_experts", "tp", Stage.DISPATCH, 1, routing("dropped"), moves=True),
    Case("absent_route_is_num_experts", "v2", Stage.DISPATCH, 2),
    Case("absent_route_is_num_experts", "flashinfer decode", Stage.DISPATCH, 2, moves=True),
    Case("dropped_route_wraps", "ep and tp", Stage.DISPATCH, 2, routing("dropped"), moves=True),
    Case(
        "dropped_route_wraps",
        "ep and tp",
        Stage.DISPATCH,
        2,
        (*routing("dropped"), "moe.redundant_experts=8"),
        moves=True,
    ),
    Case("dropped_route_wraps", "cp", Stage.DISPATCH, 3, routing("dropped"), moves=True),
    Case(
        "dropped_route_to_first_rank",
        "flashinfer decode",
        Stage.DISPATCH,
        0,
        routing("dropped"),
        moves=True,
    ),
    Case("count_off_by_one", "a2a", Stage.DISPATCH, 2, moves=True),
    Case("count_off_by_one", "v2", Stage.DISPATCH, 2, moves=True),
    Case("count_off_by_one", "v2 expanded", Stage.DISPATCH, 2, moves=True),
    Case("count_off_by_one", "slabs ll", Stage.DISPATCH, 2, moves=True),
    Case("psum_as_aligned_ends", "v2", Stage.DISPATCH, 2, moves=True),
    Case("psum_as_aligned_ends", "v2 expanded", Stage.DISPATCH, 2, moves=True),
    Case("received_rows_clipped", "a2a", Stage.DISPATCH, 2),
    Case("received_rows_clipped", "a2a", Stage.DISPATCH, 2, routing("hot_expert")),
    Case("received_rows_clipped", "flashinfer decode", Stage.DISPATCH, 2),
    Case("pad_slot_ids_kept", "flashinfer decode", Stage.DISPATCH, 2, THRICE + TOP_TWO, moves=True),
    Case("stale_row", "slabs ll", Stage.DISPATCH, 2, THRICE),
    Case("stale_row", "flashinfer decode", Stage.DISPATCH, 2, THRICE),
    Case("stale_counts", "slabs ll", Stage.DISPATCH, 2, THRICE, moves=True),
    Case("receive_buffers_overlap", "a2a", Stage.DISPATCH, 2),
    Case("receive_buffers_overlap", "slabs ll", Stage.DISPATCH, 2),
    Case("output_index_divided_twice", "a2a", Stage.PRE_PERMUTE, 2),
    Case("output_index_divided_twice", "flashinfer extend", Stage.PRE_PERMUTE, 2),
    Case("padding_expert_id_flipped", "a2a", Stage.PRE_PERMUTE, 2, moves=True),
    Case("padding_expert_id_flipped", "flashinfer extend", Stage.PRE_PERMUTE, 2, moves=True),
    Case("padding_expert_id_flipped", "v2 in place", Stage.PRE_PERMUTE, 2, moves=True),
    Case("segment_spilled", "tp", Stage.PRE_PERMUTE, 1, FULL_SEGMENTS),
    Case("row_index_wraps", "a2a", Stage.PRE_PERMUTE, 2),
    Case("row_index_wraps:bound=16", "slabs ll", Stage.PRE_PERMUTE, 2),
    Case("scale_index_wraps", "v2", Stage.PRE_PERMUTE, 2),
    Case("scale_index_wraps", "flashinfer decode", Stage.PRE_PERMUTE, 2),
    Case("padding_scales_unwritten", "v2", Stage.PRE_PERMUTE, 2, moves=True),
    Case("padding_scales_unwritten", "flashinfer extend", Stage.PRE_PERMUTE, 2, moves=True),
    Case("padding_row_counted", "a2a", Stage.PRE_PERMUTE, 2),
    Case("padding_row_counted", "summed in the tail", Stage.PRE_PERMUTE, 1),
    Case("padding_row_counted", "flashinfer decode", Stage.PRE_PERMUTE, 2),
    Case("empty_experts_closed_up:rank=3", "a2a", Stage.PRE_PERMUTE, 3, FEW_ROUTES),
    Case("empty_experts_closed_up", "ep and tp", Stage.PRE_PERMUTE, 1, ("batch.tokens=[2]",)),
    Case("slab_row_not_counted", "slabs", Stage.PRE_PERMUTE, 1),
    Case("slab_row_not_counted", "slabs ll", Stage.PRE_PERMUTE, 2),
    Case("gemm_tail_rows_dropped:tile=4", "slabs ll", Stage.GEMM1, 2),
    Case("gemm_tail_rows_dropped:tile=4,stage=gemm2", "a2a", Stage.GEMM2, 2),
    Case("tile_spilled", "v2", Stage.GEMM1, 2),
    Case("tile_spilled:stage=gemm2", "v2 in place", Stage.GEMM2, 2),
    Case("masked_rows_past_launch", "capped slabs", Stage.ACTIVATION, 0),
    Case("scale_rounded_down", "a2a", Stage.ACTIVATION, 2),
    Case("scale_rounded_down", "slabs", Stage.ACTIVATION, 1),
    Case("scale_rounded_down", "v2 expanded", Stage.ACTIVATION, 2),
    Case("topk_weights_twice", "a2a", Stage.POST_PERMUTE, 2),
    Case("topk_weights_twice", "v2 expanded", Stage.POST_PERMUTE, 2),
    Case("k_from_row0", "a2a", Stage.POST_PERMUTE, 2),
    Case("combine_weights_twice", "slabs ll", Stage.POST_PERMUTE, 2),
    Case("combine_weights_of_slot0", "slabs ll", Stage.POST_PERMUTE, 2),
    Case("combine_slot_stale", "slabs ll", Stage.COMBINE, 2, THRICE),
    Case("combine_slot_stale", "flashinfer decode", Stage.COMBINE, 2, THRICE),
    Case("combine_offset_shifted", "v2", Stage.COMBINE, 2),
    Case("combine_offset_shifted", "flashinfer extend", Stage.COMBINE, 2),
    Case("hidden_tail_dropped", "a2a", Stage.COMBINE, 2, UNEVEN_VECTORS),
    Case("scaling_factor_twice:rank=3", "a2a", Stage.TAIL, 3),
    Case("scaling_factor_twice:rank=2", "summed in the tail", Stage.POST_PERMUTE, 2),
    Case("scaling_factor_twice:rank=2", "flashinfer decode", Stage.TAIL, 2),
    Case("scaling_factor_missing:rank=0", "a2a", Stage.TAIL, 0),
    Case("scaling_factor_missing:rank=1", "slabs", Stage.POST_PERMUTE, 1),
    Case("partial_dropped", "a2a", Stage.COMBINE, 2),
    Case("partial_dropped", "slabs ll", Stage.COMBINE, 2),
    Case("shared_expert_per_rank", "a2a", Stage.TAIL, 2),
    Case("shared_expert_per_rank", "slabs", Stage.TAIL, 1),
    Case("shared_expert_per_rank:rank=0", "scattered", Stage.TAIL, 0),
    Case("shared_expert_missing", "a2a", Stage.TAIL, 2),
    Case("shared_expert_missing", "slabs", Stage.TAIL, 1),
    Case("shared_expert_missing", "scattered shards", Stage.TAIL, 2),
    Case("shared_expert_missing:rank=0", "scattered", Stage.TAIL, 0),
    Case("reduction_missing", "tp", Stage.TAIL, 1),
    Case("reduction_missing:occurrence=1", "summed in the tail", Stage.TAIL, 1),
    Case("reduction_missing", "summed in the tail", Stage.GLUE_IN, 1),
    Case("reduction_repeated", "ep and tp", Stage.TAIL, 1),
    Case("reduced_in_tail_too", "scattered shards", Stage.TAIL, 0),
    Case("scatter_without_sum", "scattered", Stage.GLUE_OUT, 2),
    Case("scatter_without_sum", "cp", Stage.GLUE_OUT, 1),
    Case("slot_of_next_group", "summed in the tail", Stage.GLUE_OUT, 1),
    Case("slot_of_next_group", "slabs", Stage.GLUE_OUT, 1),
    Case("gathered_over_the_world", "a2a of halves", Stage.GLUE_OUT, 2, ("batch.tokens=[8, 8]",)),
)

FAILED = (
    Case("plan_differs:rank=2", "a2a", Stage.WEIGHTS, 2),
    Case("combine_skipped:rank=2", "a2a", Stage.COMBINE, 2),
    Case("collective_skipped", "tp", Stage.TAIL, 1),
    Case("collective_skipped:rank=1,occurrence=1", "summed in the tail", Stage.TAIL, 1),
    Case("collective_skipped:rank=1,op=reduce_scatter_v", "cp", Stage.GLUE_OUT, 1),
    Case("collective_skipped:rank=3,op=all_gather_v", "a2a of halves", Stage.GLUE_OUT, 3),
    Case("collective_skipped:rank=1,op=all_to_all_v", "a2a", Stage.DISPATCH, 1),
)

UNREADABLE = (
    Case("replicated_rows_dispatched", "a2a of chunks", Stage.GLUE_IN, 0),
    Case("idle_dummy_row_kept", "v2", Stage.COMBINE, 1),
)
"""A rank leaves more rows than its stage hands on."""

VOID = (
    Case("placement_ignored", "a2a", Stage.WEIGHTS, 0),
    Case("redundant_experts_not_counted", "a2a of chunks", Stage.WEIGHTS, 0),
    Case("replica_left_behind", "a2a", Stage.WEIGHTS, 0),
    Case("token_shard_shifted", "tp", Stage.GLUE_IN, 1),
    Case("zigzag_undone", "scattered", Stage.GLUE_IN, 2),
    Case("weights_from_biased_scores", "tp", Stage.ROUTE, 1),
    Case("group_scored_by_best", "a2a", Stage.ROUTE, 2),
    Case("expert_groups_ignored", "a2a", Stage.ROUTE, 2),
    Case("ties_to_highest_id", "a2a", Stage.ROUTE, 2),
    Case("maximum_starts_at_zero", "a2a", Stage.ROUTE, 2),
    Case("masked_by_local_count", "tp", Stage.ROUTE, 1),
    Case("renormalization_flipped", "a2a", Stage.ROUTE, 2, routing("dropped")),
    Case("padding_rows_routed", "a2a", Stage.ROUTE, 2),
    Case("local_ids_left_global:rank=0", "a2a", Stage.DISPATCH, 0),
    Case("local_ids_left_global", "flashinfer decode", Stage.DISPATCH, 2),
    Case("no_upper_bound_on_local_id", "tp", Stage.DISPATCH, 1),
    Case("dropped_route_to_first_rank", "flashinfer decode", Stage.DISPATCH, 0),
    Case("dropped_route_to_first_rank", "flashinfer extend", Stage.DISPATCH, 0, routing("dropped")),
    Case("dropped_route_wraps", "ep and tp", Stage.DISPATCH, 2),
    Case("dropped_route_wraps", "tp", Stage.DISPATCH, 0, routing("dropped")),
    Case("dropped_route_wraps", "a2a", Stage.DISPATCH, 0, routing("dropped")),
    Case("count_off_by_one", "tp", Stage.DISPATCH, 1),
    Case("psum_as_aligned_ends", "a2a", Stage.DISPATCH, 2),
    Case("received_rows_clipped:limit=17", "a2a", Stage.DISPATCH, 2),
    Case("pad_slot_ids_kept", "flashinfer decode", Stage.DISPATCH, 2),
    Case("receive_buffers_overlap", "scattered", Stage.DISPATCH, 2),
    Case("output_index_divided_twice", "slabs ll", Stage.PRE_PERMUTE, 2),
    Case("padding_expert_id_flipped", "slabs ll", Stage.PRE_PERMUTE, 2),
    Case("segment_spilled", "a2a", Stage.PRE_PERMUTE, 2),
    Case("row_index_wraps:bound=256", "a2a", Stage.PRE_PERMUTE, 2),
    Case("scale_index_wraps", "a2a bf16", Stage.PRE_PERMUTE, 2),
    Case("padding_scales_unwritten", "a2a fp32 scales", Stage.PRE_PERMUTE, 2),
    Case("padding_scales_unwritten", "v2 in place", Stage.PRE_PERMUTE, 2),
    Case("empty_experts_closed_up", "a2a", Stage.PRE_PERMUTE, 2),
    Case("slab_row_not_counted", "tp", Stage.PRE_PERMUTE, 1),
    Case("gemm_tail_rows_dropped:tile=1", "a2a", Stage.GEMM1, 2),
    Case("tile_spilled:tile=128", "a2a", Stage.GEMM1, 2),
    Case("tile_spilled", "slabs", Stage.GEMM1, 1),
    Case("masked_rows_past_launch", "slabs", Stage.ACTIVATION, 1),
    Case("scale_rounded_down", "a2a bf16", Stage.ACTIVATION, 2),
    Case("topk_weights_twice", "tp", Stage.POST_PERMUTE, 1),
    Case("topk_weights_twice", "slabs ll", Stage.POST_PERMUTE, 2),
    Case("k_from_row0", "scattered", Stage.POST_PERMUTE, 2),
    Case("combine_weights_twice", "v2", Stage.POST_PERMUTE, 2),
    Case("combine_weights_of_slot0", "v2 expanded", Stage.POST_PERMUTE, 2),
    Case("combine_offset_shifted", "scattered", Stage.COMBINE, 2),
    Case("hidden_tail_dropped", "a2a", Stage.COMBINE, 2),
    Case("idle_dummy_row_kept", "v2 expanded", Stage.COMBINE, 1),
    Case("scaling_factor_twice", "ep and tp", Stage.POST_PERMUTE, 1),
    Case("shared_expert_per_rank", "tp", Stage.TAIL, 1),
    Case("shared_expert_missing:rank=1", "scattered", Stage.TAIL, 1),
    Case("reduced_in_tail_too", "tp", Stage.TAIL, 0),
    Case("replicated_rows_dispatched", "tp", Stage.GLUE_IN, 0),
    Case("slot_of_next_group", "scattered", Stage.GLUE_OUT, 2),
    Case("gathered_over_the_world", "scattered", Stage.GLUE_OUT, 2),
)

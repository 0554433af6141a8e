"""Where a fault finds nothing to act on, or changes no bit: one short sentence each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_WHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "nowhere": """
            gate_up_swapped scaling_factor_in_router nan_scores plan_differs rank_raises rank_dies
            rank_hangs checker_blinded gate_up_interleave_mismatch
        """,
        "on a rank with fewer than two rows": "tokens_swapped",
        "one slot a token": "expert_chosen_twice",
        "a single rank, or a rank whose experts are a block in either order": "experts_strided",
        "placement contiguous": "placement_ignored",
        "no redundant experts": "redundant_experts_not_counted replica_left_behind",
        "weights whose scales are fp32 when used, or that come without fp32 scales": """
            requant_skipped requant_wrong_attr requant_without_pow2
        """,
        "recipes other than fp8_per_tensor, and power-of-two scales": """
            per_tensor_scale_of_gate_for_up
        """,
        "recipes without fp4 weights in their checkpoint": """
            fp4_nibbles_swapped fp4_scale_group_of_128
        """,
        "weight scales that are fp32, or none": "packed_scale_sent_raw_expected",
        "weights without scales, or a rank with one expert": "stale_scale_after_reload",
        "experts that need no padding": "padded_rows_loaded padded_columns_filled",
        "weights in bf16, in groups of 32, or with fp32 scales": """
            pack_mantissa_leak_2d pow2_log2_inexact
        """,
        "weights whose scales cover blocks of rows": "scale_col_coarse",
        "weight scales that are fp32 when used, or none": "fp32_scale_read_as_packed",
        "ranks of a group that do not split its rows": """
            token_shard_shifted replicated_rows_dispatched
        """,
        "no gather, or one of equal rows": "first_chunk_for_all chunks_of_next_rank",
        "no gather, or chunks of equal length": "chunks_read_as_equal",
        "no context parallelism in zigzag order": "zigzag_undone",
        "a router without a correction bias, hashed or pinned": "weights_from_biased_scores",
        "group sizes that are not its parameters, or one choice by both": "group_scored_by_best",
        "no group, or no negative score + bias in a chosen one": "masked_groups_score_zero",
        "no two experts of equal rank at the edge of the choice": "ties_to_highest_id",
        "no negative score + bias among the chosen": "maximum_starts_at_zero",
        "rows that are not gathered": "masked_by_local_count",
        "a router that is hashed or pinned": "renormalization_flipped",
        "experts in a single group": "expert_groups_ignored",
        "every row has a route, or weights are not normalised": "renormalized_without_guard",
        "layers without a hash table": "hash_of_next_entry",
        "no padding rows, or padding that is routed": "padding_rows_routed padding_mask_rolled",
        "rank 0, and formats whose ids become local behind dispatch": "local_ids_left_global",
        "dispatchers other than standard, and a rank with the last experts": """
            no_upper_bound_on_local_id
        """,
        "every slot has a local route, or rows are routes": "absent_route_is_num_experts",
        "no dropped route, a single EP rank, or dispatchers other than standard": """
            dropped_route_wraps
        """,
        "formats that announce no counts (standard, flashinfer)": "count_off_by_one",
        "a router that is hashed or pinned, or sums that any order leaves alike": """
            sum_order_varies tile_depends_on_batch
        """,
        "no dropped route, one expert a rank, or formats other than flashinfer in decode": """
            dropped_route_to_first_rank
        """,
        "formats whose weights stay with the token (standard, low latency)": "weights_sent_in_bf16",
        "dispatchers other than deepep_v2": "psum_as_aligned_ends",
        "no more received rows than its limit, or rows that are routes": "received_rows_clipped",
        "a first round, or formats other than flashinfer in decode": "pad_slot_ids_kept",
        "a first round, or formats whose buffers do not stay": "stale_row combine_slot_stale",
        "a first round, or formats other than low latency": "stale_counts",
        "a first round, or a sum that the tail does not take": "reduced_sum_stale",
        "no two received rows in a row, or dispatcher standard": "receive_buffers_overlap",
        "rows of zeros that nobody quantises, or none": "amax_floor_dropped",
        "scales that are not packed, or whole words of them": "dispatch_scale_stride_pad",
        "a wire without packed scales": "ue8m0_flag_dropped",
        "a wire without fp32 scales": "dispatch_scale_flag_disagrees",
        "slabs, and rows of routes": """
            output_index_divided_twice padding_row_counted
        """,
        "slabs": "padding_expert_id_flipped split_scale_not_padded tile_spilled",
        "no segment that is full to its last row": "segment_spilled",
        "fewer grouped rows than its bound": "row_index_wraps",
        "fewer grouped rows than its bound, or no scales": "scale_index_wraps",
        "every local expert has a row, or slabs": "empty_experts_closed_up",
        "segments": "slab_row_not_counted",
        "segments, and counts under its bound": "slab_counts_wrap",
        "slabs, scales that are not packed, or expanded rows": "padding_scales_unwritten",
        "a wire without fp32 scales, or dispatchers other than low latency": """
            low_latency_scales_rounded_up
        """,
        "rows without scales, or scales with one column": "scales_in_wrong_layout",
        "rows in whole tiles": "gemm_tail_rows_dropped",
        "a single block of columns": "tile_of_next_block",
        "an even number of blocks of columns": "odd_block_unwritten",
        "rows without scales": "scale_rounded_down scale_inverted scale_of_next_row",
        "rows without scales, or with one group": "scale_of_next_block scale_of_first_block",
        "segments, or slabs as high as there are tokens": "masked_rows_past_launch",
        "no clamp by its limit, or no value beyond it": """
            routed_no_clamp clamp_after_product shared_no_clamp
        """,
        "a silu without a clamp": "activation_plain_silu",
        "activations other than oai_swiglu": "up_without_one",
        "activations other than situ": "situ_tan",
        "activation scales that are fp32, or none": """
            scales_rounded_up_late pack_mantissa_leak fp32_scale_unpacked_read
        """,
        "formats that fold the factor in with the weights, or weigh in combine": """
            topk_weights_twice topk_weights_missing k_from_row0
        """,
        "formats whose weights are folded in before combine": """
            combine_weights_twice combine_weights_missing combine_weights_of_slot0
        """,
        "dispatcher standard, or a single token": "combine_offset_shifted combine_rows_raced",
        "dispatcher standard, or whole vectors": "hidden_tail_dropped",
        "no idle rank, or formats other than deepep_v2 in extend": "idle_dummy_row_kept",
        "no idle rank, or no all-to-all": "idle_rank_leaves",
        "dispatchers without such a call": "combine_skipped",
        "dispatchers without such a call, or no row that comes back": """
            partial_dropped partial_doubled
        """,
        "dispatchers without such a call, or rows from fewer than two ranks": """
            partial_of_another_rank
        """,
        "a model whose factor is 1": "scaling_factor_twice scaling_factor_missing",
        "models without a shared expert": "shared_expert_missing",
        "models without a shared expert, or a single rank": """
            shared_expert_per_rank shared_expert_split
        """,
        "topologies whose glue does not sum": "reduced_in_tail_too",
        "topologies without such a call": """
            collective_skipped reduction_missing reduction_repeated summand_doubled
            scatter_without_sum
        """,
        "a rank that keeps no slot of gathered rows": "slot_of_next_group",
        "a gather over all ranks, or none": "gathered_over_the_world",
        "scales that are no powers of two": "golden_of_other_scales",
        "an activation without a clamp": "golden_without_clamp",
    }
)

VOID_WHERE: Final[Mapping[str, str]] = MappingProxyType(
    {name: where for where, names in _WHERE.items() for name in names.split()}
)
"""Fault -> where it is void."""

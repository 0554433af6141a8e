"""What kind of bug each fault stands for, in the order of the catalogue's classes."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class FaultClass(StrEnum):
    """Kinds of bug that public trackers of MoE engines report; the value is its title."""

    SCALING_FACTOR = "routed scaling factor applied never or twice"
    ROUTER = "experts or mixing weights chosen wrongly"
    PADDING_ROWS = "padding rows taken for tokens, or tokens for padding"
    SENTINELS = "the mark of an absent route misread"
    ID_SPACES = "global, local, logical and physical expert ids mixed up"
    ROW_MAPS = "the map between tokens and grouped rows wrong"
    COUNTS = "capacities, counts and offsets computed wrongly"
    EMPTY_RANKS = "a rank or an expert without rows handled wrongly"
    GROUPS = "a collective with the wrong sizes or the wrong group"
    STALE_BUFFERS = "a buffer overlaps another one or keeps what was in it"
    RACES = "memory read before it is written, or written while it is read"
    POWERS_OF_TWO = "power-of-two scales rounded or packed wrongly"
    SCALE_LAYOUT = "scales of another row, block or layout"
    FORMATS = "producer and consumer disagree on a format"
    UNINITIALISED = "padding that nobody wrote, read"
    TILES = "rows or columns past a tile's edge lost or overwritten"
    WRAPPED_INDICES = "an index too wide for its integer"
    ACTIVATION = "clamp, order of gate and up, or formula of the activation wrong"
    PREPARATION = "weights loaded, sharded, quantised again or moved wrongly"
    KERNEL_CHOICE = "another kernel or tactic than asked for, or a wrong one"
    SHARED_EXPERT = "the shared expert counted too often or too seldom"
    REDUCTION = "the sum over the ranks missing, doubled or of the wrong parts"
    ROW_LAYOUT = "rows of ranks that split tokens mixed up"
    APPLIED_WEIGHTS = "top-k weights applied never, twice or from another slot"
    FROZEN_DECISIONS = "a decision or counter frozen by graph capture"
    DETERMINISM = "results that vary from run to run, batch to batch or with the topology"
    JUDGES = "a blind checker or a golden model of something else"
    INFRASTRUCTURE = "a rank that fails, dies or hangs"


NO_FAULT_OF: Final[Mapping[FaultClass, str]] = MappingProxyType(
    {
        FaultClass.FROZEN_DECISIONS: "needs graph capture, so a GPU; what a replay leaves behind "
        "is emulated by the stale buffers",
    }
)
"""Classes without a fault, and why."""

_NAMES: Final[Mapping[FaultClass, str]] = MappingProxyType(
    {
        FaultClass.SCALING_FACTOR: """
            scaling_factor_twice scaling_factor_missing scaling_factor_in_router
        """,
        FaultClass.ROUTER: """
            weights_from_biased_scores group_scored_by_best masked_groups_score_zero
            ties_to_highest_id maximum_starts_at_zero renormalization_flipped expert_groups_ignored
            renormalized_without_guard nan_scores hash_of_next_entry
        """,
        FaultClass.PADDING_ROWS: "masked_by_local_count padding_rows_routed padding_mask_rolled",
        FaultClass.SENTINELS: """
            absent_route_is_num_experts dropped_route_wraps dropped_route_to_first_rank
            pad_slot_ids_kept padding_row_counted
        """,
        FaultClass.ID_SPACES: """
            experts_strided redundant_experts_not_counted replica_left_behind
            local_ids_left_global no_upper_bound_on_local_id expert_chosen_twice
        """,
        FaultClass.ROW_MAPS: """
            output_index_divided_twice padding_expert_id_flipped segment_spilled k_from_row0
            psum_as_aligned_ends tokens_swapped
        """,
        FaultClass.COUNTS: """
            plan_differs count_off_by_one received_rows_clipped slab_counts_wrap
            slab_row_not_counted
        """,
        FaultClass.EMPTY_RANKS: """
            empty_experts_closed_up idle_dummy_row_kept idle_rank_leaves collective_skipped
            combine_skipped
        """,
        FaultClass.GROUPS: """
            first_chunk_for_all chunks_read_as_equal chunks_of_next_rank gathered_over_the_world
            slot_of_next_group
        """,
        FaultClass.STALE_BUFFERS: """
            stale_row stale_counts receive_buffers_overlap combine_slot_stale
            combine_offset_shifted reduced_sum_stale
        """,
        FaultClass.RACES: """
            combine_rows_raced partial_dropped partial_of_another_rank partial_doubled
            summand_doubled
        """,
        FaultClass.POWERS_OF_TWO: """
            scale_rounded_down scales_rounded_up_late low_latency_scales_rounded_up
            pack_mantissa_leak pack_mantissa_leak_2d pow2_log2_inexact amax_floor_dropped
        """,
        FaultClass.SCALE_LAYOUT: """
            scale_col_coarse dispatch_scale_stride_pad scales_in_wrong_layout
            split_scale_not_padded scale_of_next_block scale_of_first_block scale_of_next_row
        """,
        FaultClass.FORMATS: """
            fp32_scale_read_as_packed fp32_scale_unpacked_read ue8m0_flag_dropped
            dispatch_scale_flag_disagrees scale_inverted fp4_nibbles_swapped
            fp4_scale_group_of_128 per_tensor_scale_of_gate_for_up
        """,
        FaultClass.UNINITIALISED: "padding_scales_unwritten padded_columns_filled",
        FaultClass.TILES: """
            gemm_tail_rows_dropped tile_spilled odd_block_unwritten hidden_tail_dropped
            masked_rows_past_launch
        """,
        FaultClass.WRAPPED_INDICES: "row_index_wraps scale_index_wraps",
        FaultClass.ACTIVATION: """
            gate_up_swapped gate_up_interleave_mismatch routed_no_clamp clamp_after_product
            shared_no_clamp activation_plain_silu up_without_one situ_tan
        """,
        FaultClass.PREPARATION: """
            requant_skipped requant_wrong_attr requant_without_pow2 stale_scale_after_reload
            packed_scale_sent_raw_expected padded_rows_loaded placement_ignored
        """,
        FaultClass.KERNEL_CHOICE: "tile_of_next_block",
        FaultClass.SHARED_EXPERT: """
            shared_expert_per_rank shared_expert_missing shared_expert_split
        """,
        FaultClass.REDUCTION: """
            reduced_in_tail_too reduction_missing reduction_repeated scatter_without_sum
        """,
        FaultClass.ROW_LAYOUT: "token_shard_shifted replicated_rows_dispatched zigzag_undone",
        FaultClass.APPLIED_WEIGHTS: """
            topk_weights_twice topk_weights_missing combine_weights_twice combine_weights_missing
            combine_weights_of_slot0
        """,
        FaultClass.DETERMINISM: "sum_order_varies tile_depends_on_batch weights_sent_in_bf16",
        FaultClass.JUDGES: "checker_blinded golden_of_other_scales golden_without_clamp",
        FaultClass.INFRASTRUCTURE: "rank_raises rank_dies rank_hangs",
    }
)

CLASSES: Final[Mapping[str, FaultClass]] = MappingProxyType(
    {name: kind for kind, names in _NAMES.items() for name in names.split()}
)
"""Fault -> its class."""

"""Which kinds of mistake name each fault rightly, where its first divergence is diagnosed.

Several kinds stand for one fault where it looks like either: rows that a gather shifts are
misplaced rows, and scales that run out of a table are padding's.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from moe.mistakes import Mistake

_ROWS: Final = frozenset({Mistake.ROWS_MISPLACED})
_ROWS_OF_GATHER: Final = _ROWS | {Mistake.COLLECTIVE}
_ROWS_OR_PADDING: Final = _ROWS | {Mistake.PADDING_LEAK}
_EXPERT: Final = frozenset({Mistake.WRONG_EXPERT})
_CHOICE: Final = frozenset({Mistake.EXPERT_CHOICE})
_WEIGHTS: Final = frozenset({Mistake.TOPK_WEIGHTS})
_LOST: Final = frozenset({Mistake.ROUTES_LOST})
_IDS: Final = frozenset({Mistake.IDS})
_COUNTS: Final = frozenset({Mistake.COUNTS})
_STALE: Final = frozenset({Mistake.STALE})
_PADDING: Final = frozenset({Mistake.PADDING_LEAK})
_TAIL_ROWS: Final = frozenset({Mistake.TAIL_ROWS})
_TAIL_COLUMNS: Final = frozenset({Mistake.TAIL_COLUMNS})
_HALVES: Final = frozenset({Mistake.GATE_UP_SWAPPED})
_FORMULA: Final = frozenset({Mistake.ACTIVATION})
_LATE: Final = frozenset({Mistake.SCALE_LATE})
_EXPONENT: Final = frozenset({Mistake.SCALE_EXPONENT})
_DONOR: Final = frozenset({Mistake.SCALE_DONOR})
_FORM: Final = frozenset({Mistake.SCALE_FORM})
_FACTOR: Final = frozenset({Mistake.SCALING_FACTOR})
_SHARED: Final = frozenset({Mistake.SHARED_EXPERT})
_NO_SUM: Final = frozenset({Mistake.SUM_MISSING})
_TWO_SUMS: Final = frozenset({Mistake.SUM_REPEATED})
_OF_ANOTHER: Final = frozenset({Mistake.PARTIAL_OF_ANOTHER_RANK})

_OTHER_GOLDEN: Final = "the layer is right; what differs is the model that judges it"
_ONLY_BITS: Final = "no value is wrong: the same tokens have other bits, and none of them are due"

NOT_DIAGNOSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "plan_differs": "the ranks stop before the first forward",
        "replicated_rows_dispatched": "the trace cannot be read: rows are not those of the plan",
        "collective_skipped": "no rank comes back, so there are no values",
        "combine_skipped": "no rank comes back, so there are no values",
        "idle_rank_leaves": "no rank comes back, so there are no values",
        "idle_dummy_row_kept": "the trace cannot be read: a row too many",
        "rank_raises": "the rank has no values; the result says where and why it ended",
        "rank_dies": "the rank has no values; the result says where it ended",
        "rank_hangs": "the rank has no values; the result says where it hangs",
        "checker_blinded": "a check that finds nothing has nothing to diagnose",
        "golden_of_other_scales": _OTHER_GOLDEN,
        "golden_without_clamp": _OTHER_GOLDEN,
        "sum_order_varies": _ONLY_BITS,
        "tile_depends_on_batch": _ONLY_BITS,
    }
)
"""Faults that leave no deviation, each with the reason."""

MISTAKES: Final[Mapping[str, frozenset[Mistake]]] = MappingProxyType(
    {
        "gate_up_swapped": _HALVES,
        "gate_up_interleave_mismatch": _HALVES,
        "experts_strided": _EXPERT,
        "placement_ignored": _EXPERT,
        "redundant_experts_not_counted": _EXPERT,
        "replica_left_behind": _EXPERT,
        "requant_skipped": _LATE,
        "requant_wrong_attr": _LATE,
        "requant_without_pow2": _EXPONENT,
        "per_tensor_scale_of_gate_for_up": _DONOR,
        "fp4_nibbles_swapped": _FORM,
        "fp4_scale_group_of_128": _DONOR,
        "packed_scale_sent_raw_expected": _FORM,
        "stale_scale_after_reload": _DONOR,
        "padded_rows_loaded": _PADDING,
        "padded_columns_filled": _PADDING,
        "token_shard_shifted": _ROWS,
        "slot_of_next_group": _ROWS,
        "first_chunk_for_all": _ROWS_OF_GATHER,
        "chunks_read_as_equal": _ROWS_OF_GATHER,
        "chunks_of_next_rank": _ROWS_OF_GATHER,
        "zigzag_undone": _ROWS_OF_GATHER,
        "gathered_over_the_world": _ROWS_OF_GATHER,
        "weights_from_biased_scores": _WEIGHTS,
        "scaling_factor_in_router": _FACTOR,
        "renormalized_without_guard": _WEIGHTS,
        "renormalization_flipped": _WEIGHTS,
        "group_scored_by_best": _CHOICE,
        "expert_groups_ignored": _CHOICE,
        "ties_to_highest_id": _CHOICE,
        "maximum_starts_at_zero": _CHOICE,
        "masked_groups_score_zero": _CHOICE,
        "expert_chosen_twice": _CHOICE,
        "hash_of_next_entry": _CHOICE,
        "nan_scores": _LOST,
        "padding_mask_rolled": _LOST | _PADDING,
        "masked_by_local_count": _LOST,
        "padding_rows_routed": _PADDING,
        "tokens_swapped": _ROWS,
        "local_ids_left_global": _IDS,
        "no_upper_bound_on_local_id": _IDS,
        "absent_route_is_num_experts": _IDS,
        "dropped_route_wraps": _IDS,
        "dropped_route_to_first_rank": _IDS,
        "count_off_by_one": _COUNTS,
        "slab_counts_wrap": _COUNTS,
        "psum_as_aligned_ends": _COUNTS,
        "received_rows_clipped": _LOST,
        "weights_sent_in_bf16": _WEIGHTS,
        "pad_slot_ids_kept": _STALE | _PADDING,
        "stale_row": _STALE,
        "stale_counts": _STALE,
        "receive_buffers_overlap": _TAIL_COLUMNS,
        "output_index_divided_twice": _ROWS_OR_PADDING,
        "padding_expert_id_flipped": _IDS,
        "segment_spilled": _ROWS | _TAIL_ROWS,
        "row_index_wraps": _ROWS_OR_PADDING,
        "scale_index_wraps": _DONOR | _PADDING,
        "padding_scales_unwritten": _PADDING,
        "padding_row_counted": _PADDING,
        "empty_experts_closed_up": _EXPERT,
        "slab_row_not_counted": _COUNTS,
        "gemm_tail_rows_dropped": _TAIL_ROWS,
        "tile_spilled": _TAIL_ROWS,
        "tile_of_next_block": _TAIL_COLUMNS,
        "odd_block_unwritten": _TAIL_COLUMNS,
        "masked_rows_past_launch": _TAIL_ROWS,
        "routed_no_clamp": _FORMULA,
        "clamp_after_product": _FORMULA,
        "activation_plain_silu": _FORMULA,
        "up_without_one": _FORMULA,
        "situ_tan": _FORMULA,
        "shared_no_clamp": _FORMULA,
        "scales_rounded_up_late": _LATE,
        "low_latency_scales_rounded_up": _LATE,
        "pack_mantissa_leak": _FORM | _EXPONENT,  # of a single group it is a scale rounded down
        "pack_mantissa_leak_2d": _FORM,
        "pow2_log2_inexact": _EXPONENT,
        "amax_floor_dropped": frozenset({Mistake.SCALE_FLOOR}),
        "scale_inverted": _FORM,
        "scale_rounded_down": _EXPONENT,
        "scale_col_coarse": _DONOR,
        "dispatch_scale_stride_pad": _FORM,
        "scales_in_wrong_layout": _FORM,
        "split_scale_not_padded": _DONOR | _PADDING,
        "scale_of_next_block": _DONOR,
        "scale_of_next_row": _DONOR,
        "scale_of_first_block": _DONOR,
        "fp32_scale_read_as_packed": _FORM,
        "fp32_scale_unpacked_read": _FORM,
        "ue8m0_flag_dropped": _FORM,
        "dispatch_scale_flag_disagrees": _LATE | _FORM,
        "topk_weights_twice": _WEIGHTS,
        "topk_weights_missing": _WEIGHTS,
        "combine_weights_twice": _WEIGHTS,
        "combine_weights_missing": _WEIGHTS,
        "combine_weights_of_slot0": _WEIGHTS,
        "k_from_row0": _LOST,
        "combine_offset_shifted": _ROWS,
        "combine_slot_stale": _STALE,
        "combine_rows_raced": _ROWS,
        "hidden_tail_dropped": _TAIL_COLUMNS,
        "partial_dropped": _LOST | {Mistake.PARTIAL_MISSING},
        "partial_doubled": _LOST | {Mistake.PARTIAL_DOUBLED},
        "partial_of_another_rank": _OF_ANOTHER,
        "summand_doubled": _OF_ANOTHER,
        "reduced_sum_stale": _STALE,
        "scaling_factor_twice": _FACTOR,
        "scaling_factor_missing": _FACTOR,
        "shared_expert_per_rank": _SHARED,
        "shared_expert_missing": _SHARED,
        "shared_expert_split": _SHARED,
        "reduced_in_tail_too": _TWO_SUMS,
        "reduction_missing": _NO_SUM,
        "reduction_repeated": _TWO_SUMS,
        "scatter_without_sum": _NO_SUM,
    }
)
"""By name of the fault."""

"""Which glue a topology has: one flow each, and nobody else decides."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Final

from topology.layout import ParallelLayout
from topology.splits import PADDING, Rows, align, cp_shares, padded, tensor_split
from topology.sync_types import (
    Gather,
    Padding,
    PaddingError,
    Reducer,
    Return,
    SyncError,
    SyncOptions,
    SyncPlan,
)

__all__ = [
    "PADDING",
    "Gather",
    "Padding",
    "PaddingError",
    "Reducer",
    "Return",
    "SyncError",
    "SyncOptions",
    "SyncPlan",
    "sync_plan",
]

_DP_RETURNS: Final = (
    "behind a DP gather the tail all-reduces and rows return by dp_scatter; with one rank a DP "
    "group they may be summed by reduce_scatter (max_len) or reduce_scatter_v (sum_len, or as "
    "many EP ranks); leave it auto"
)


def sync_plan(
    layout: ParallelLayout,
    tokens: Sequence[int],
    *,
    a2a: bool,
    extend: bool,
    options: SyncOptions,
) -> SyncPlan:
    """The flow that upstream takes under this topology.

    Args:
        layout: degrees of attention and MoE.
        tokens: real tokens of each attention-DP group; 0 allowed.
        a2a: the dispatcher moves tokens to their experts.
        extend: prefill; otherwise decode.
        options: choices over upstream's own rules.

    Raises:
        ValueError: not one non-negative count a DP group.
        SyncError: no flow is defined for the topology, or for an option under it.

    Source: SGLang 0.5.21, models/deepseek_v4.py::_run_moe_ffn_dp_sync.
    """
    if len(tokens) != layout.attn_dp or any(count < 0 for count in tokens):
        raise ValueError(f"need {layout.attn_dp} counts of at least 0, got {list(tokens)}")
    padding = _padding(layout, tokens, extend, options)
    groups = _group_rows(layout, tokens, padding)
    if a2a:
        return _exchanged(layout, groups, padding, options)
    if layout.cp > 1:
        return _cp_gathered(layout, groups, options)
    if layout.attn_dp > 1:
        return _dp_gathered(layout, groups, padding, options)
    return _replicated(layout, groups, options)


def _padding(
    layout: ParallelLayout, tokens: Sequence[int], extend: bool, options: SyncOptions
) -> Padding:
    """The sum in prefill; in decode equal slots, unless less than half of them would be filled.

    Source: SGLang 0.5.21, layers/dp_attention.py::DpPaddingMode.get_dp_padding_mode.
    """
    asked = options.padding
    if asked is not None and (asked is Padding.NONE) != (layout.attn_dp == 1):
        raise PaddingError(
            f"padding {asked}: slots are padded between attention-DP groups, dp is {layout.attn_dp}"
        )
    if options.force_max_len and asked is Padding.SUM_LEN:
        raise PaddingError("padding sum_len: the dispatcher pads every slot to the longest")
    if layout.attn_dp == 1:
        return Padding.NONE
    if options.force_max_len:
        return Padding.MAX_LEN
    if asked is not None:
        return asked
    counts = [align(count, layout.attn_tp) for count in tokens]
    evenly_filled = 2 * sum(counts) >= max(counts) * layout.attn_dp
    return Padding.MAX_LEN if evenly_filled and not extend else Padding.SUM_LEN


def _group_rows(
    layout: ParallelLayout, tokens: Sequence[int], padding: Padding
) -> tuple[Rows, ...]:
    """Rows of each attention-DP group: its tokens, then padding up to its slot."""
    alignment = 1 if padding is Padding.NONE else layout.attn_tp
    lengths = [align(count, alignment) for count in tokens]
    if padding is Padding.MAX_LEN:
        lengths = [max(lengths)] * len(lengths)
    ends = accumulate(tokens)
    return tuple(
        padded(tuple(range(end - count, end)), length)
        for count, end, length in zip(tokens, ends, lengths, strict=True)
    )


def _entry(
    layout: ParallelLayout, groups: Sequence[Rows], options: SyncOptions
) -> tuple[Rows, ...]:
    """Rows of each rank: CP ranks share their group's rows, TP ranks hold the same ones."""
    return tuple(
        share
        for rows in groups
        for share in cp_shares(rows, layout.cp, zigzag=options.zigzag)
        for _ in range(layout.attn_tp)
    )


def _exchanged(
    layout: ParallelLayout, groups: Sequence[Rows], padding: Padding, options: SyncOptions
) -> SyncPlan:
    """An all-to-all: ranks with equal rows keep a chunk each; combine adds what comes back."""
    if layout.moe_tp > 1:
        raise SyncError(f"an all-to-all moves tokens to whole experts: moe_tp is {layout.moe_tp}")
    _expect_reduce(options, None, "combine adds the partial results of an all-to-all")
    entry = layer = _entry(layout, groups, options)
    splits = layout.attn_tp > 1 and layout.cp == 1
    if splits:
        layer = tuple(chunk for rows in groups for chunk in tensor_split(rows, layout.attn_tp))
    return SyncPlan(
        gather=Gather.TENSOR_SPLIT if splits else Gather.NONE,
        returning=Return.ALL_GATHER if splits else Return.NONE,
        reducer=Reducer.COMBINE,
        padding=padding,
        slots=(),
        entry=entry,
        layer=layer,
        masks_padding=True,
    )


def _replicated(layout: ParallelLayout, groups: Sequence[Rows], options: SyncOptions) -> SyncPlan:
    """One attention-TP group is the world: every rank has all rows already."""
    _expect_reduce(options, "all_reduce", "every rank keeps every row, so nothing is scattered")
    entry = _entry(layout, groups, options)
    return SyncPlan(
        gather=Gather.NONE,
        returning=Return.NONE,
        reducer=Reducer.TAIL,
        padding=Padding.NONE,
        slots=(),
        entry=entry,
        layer=entry,
        masks_padding=True,
    )


def _cp_gathered(layout: ParallelLayout, groups: Sequence[Rows], options: SyncOptions) -> SyncPlan:
    """Context-parallel ranks gather equal slots and scatter the sum back to them."""
    if layout.attn_dp * layout.attn_tp > 1:
        raise SyncError(
            f"cp({layout.cp}) without an all-to-all needs attention dp = tp = 1, "
            f"has dp({layout.attn_dp}) tp({layout.attn_tp})"
        )
    _expect_reduce(options, "reduce_scatter", "context parallelism scatters equal slots")
    shares = _entry(layout, groups, options)
    longest = max(map(len, shares))
    entry = tuple(padded(share, longest) for share in shares)
    return SyncPlan(
        gather=Gather.ALL_GATHER,
        returning=Return.REDUCE_SCATTER,
        reducer=Reducer.GLUE_OUT,
        padding=Padding.NONE,
        slots=tuple(map(len, entry)),
        entry=entry,
        layer=(tuple(chain(*entry)),) * layout.world_size,
        masks_padding=False,
    )


def _dp_gathered(
    layout: ParallelLayout, groups: Sequence[Rows], padding: Padding, options: SyncOptions
) -> SyncPlan:
    """Every rank computes the rows of all DP groups on its part of the experts.

    Source: SGLang 0.5.21, layers/dp_attention.py::_dp_gather, dp_scatter.
    """
    returning = _dp_return(layout, padding, options)
    scatters = returning is not Return.DP_SCATTER
    return SyncPlan(
        gather=_dp_gather(layout, padding, options),
        returning=returning,
        reducer=Reducer.GLUE_OUT if scatters else Reducer.TAIL,
        padding=padding,
        slots=tuple(map(len, groups)),
        entry=_entry(layout, groups, options),
        layer=(tuple(chain(*groups)),) * layout.world_size,
        masks_padding=False,
    )


def _dp_gather(layout: ParallelLayout, padding: Padding, options: SyncOptions) -> Gather:
    """The route of the DP gather."""
    if padding is Padding.MAX_LEN:
        replicated = layout.attn_tp > 1
        return Gather.REDUCE_SCATTER_ALL_GATHER if replicated else Gather.ALL_GATHER
    return Gather.ALL_GATHER_V if _gathers_v(layout, padding, options) else Gather.ALL_REDUCE


def _dp_return(layout: ParallelLayout, padding: Padding, options: SyncOptions) -> Return:
    """How the owned rows come back from a DP gather."""
    one_rank_a_group = layout.world_size == layout.attn_dp
    scatters_equally = one_rank_a_group and padding is Padding.MAX_LEN
    if options.reduce in (None, Return.REDUCE_SCATTER_V) and _gathers_v(layout, padding, options):
        return Return.REDUCE_SCATTER_V
    asked = options.reduce == Return.REDUCE_SCATTER
    if (asked or (options.reduce is None and options.reduce_scatter)) and scatters_equally:
        return Return.REDUCE_SCATTER
    _expect_reduce(options, Return.DP_SCATTER, _DP_RETURNS)
    return Return.DP_SCATTER


def _gathers_v(layout: ParallelLayout, padding: Padding, options: SyncOptions) -> bool:
    """Whether slots of unequal length may travel: always under DP x EP, elsewhere if asked for.

    Source: SGLang 0.5.21, layers/dp_attention.py::should_use_dp_reduce_scatterv.
    """
    if layout.world_size != layout.attn_dp:
        return False
    asked = options.gatherv or options.reduce == Return.REDUCE_SCATTER_V
    return layout.ep == layout.attn_dp or (asked and padding is Padding.SUM_LEN)


def _expect_reduce(options: SyncOptions, only: str | None, rule: str) -> None:
    """Raise ``SyncError`` where another reduction is asked for than the ``only`` one there is."""
    if options.reduce not in (None, only):
        raise SyncError(f"reduce {options.reduce}: {rule}")

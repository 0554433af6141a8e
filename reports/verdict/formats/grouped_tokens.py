"""Formats whose received rows are bf16 tokens, quantised and grouped by this rank: what they share.

Two layouts, each with SGLang's switches: slabs as high as the tokens or the fullest expert call
for, or segments in a buffer that holds any routing.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import GemmLayout, ScaleFormat, Stage
from reports.verdict.formats.expanded_segments import rounded_up
from reports.verdict.formats.grouped_rows import check_quantised
from reports.verdict.formats.padding import check_padding
from reports.verdict.formats.routes import check_counts, check_output_index
from reports.verdict.formats.token_rows import TokenRowsView
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.stage_checks import broken
from reports.verdict.subject import Subject

SLAB_STEP = 256

GROUPED_TOKENS: Final[Mapping[tuple[Stage, str], torch.dtype]] = MappingProxyType(
    {
        (Stage.DISPATCH, "topk_ids"): torch.int32,
        (Stage.DISPATCH, "topk_weights"): torch.float32,
        (Stage.DISPATCH, "hidden_states"): torch.bfloat16,
        (Stage.PRE_PERMUTE, "rows.m_indices"): torch.int32,
        (Stage.PRE_PERMUTE, "rows.masked_m"): torch.int32,
        (Stage.PRE_PERMUTE, "restore.output_index"): torch.int32,
    }
)
"""dtypes of what every such format hands over."""


class GroupedTokensView(TokenRowsView):
    """See ``FormatView``."""

    stored_as: Mapping[tuple[Stage, str], torch.dtype] = GROUPED_TOKENS
    folds_factor = True

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Segments aligned with -1 on padding up to the bound, or slabs of the rule's height."""
        if subject.layer.gemm_layout is GemmLayout.MASKED:
            _check_slabs(subject, rank, ledger)
        else:
            _check_segments(subject, rank, ledger)
            check_padding(subject, rank, ledger, zeroes=_zeroes_padding(subject.layer))
        check_output_index(subject, rank, ledger, self.local_ids(subject, rank))

    def check_pre_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Every route's grouped row is its token's row, by the quantiser rule."""
        for rank in subject.ranks:
            check_quantised(subject, rank, ledger)
            self.check_restore(subject, rank, ledger)


def _zeroes_padding(layer: JudgedLayer) -> bool:
    """Of segments with scales alone, and not where SM120 lays them out.

    Source: SGLang 0.5.21, pre_permute_standard_to_deep_gemm, deep_gemm_sm120.maybe_pre_permute.
    """
    has_scales = layer.scale_format is not ScaleFormat.NONE
    return layer.zeroes_padding and has_scales and not layer.wide_segments


def _counts(subject: Subject, rank: int) -> Tensor:
    return torch.bincount(subject.routes[rank].local, minlength=subject.layer.slots_per_rank)


def _check_slabs(subject: Subject, rank: int, ledger: Ledger) -> None:
    traced = subject.stage(Stage.PRE_PERMUTE, rank)
    due = _counts(subject, rank)

    def of_slab(got: int, want: int, place: Sequence[int]) -> str:
        return f"masked_m is {got} for {want} routes"

    check_counts(subject, rank, ledger, Stage.PRE_PERMUTE, "rows.masked_m", due, of_slab)
    height = traced["rows.hidden_states"].shape[1]
    due_height = (len(subject.received_from[rank]) // SLAB_STEP + 1) * SLAB_STEP
    if subject.layer.caps_slabs:
        steps = -(-int(due.max()) // SLAB_STEP)
        due_height = min(due_height, max(1, steps) * SLAB_STEP)
    if height != due_height:
        detail = f"slabs of {height} rows, {due_height} are due"
        broken(ledger, Stage.PRE_PERMUTE, rank, "rows.hidden_states", detail)


def _check_segments(subject: Subject, rank: int, ledger: Ledger) -> None:
    counts, block = _counts(subject, rank), subject.layer.row_alignment
    m_indices = subject.stage(Stage.PRE_PERMUTE, rank)["rows.m_indices"]
    due = _segments_due(subject, rank, counts).to(m_indices.dtype)
    if not torch.equal(m_indices, due):
        detail = f"{len(m_indices)} rows that are not segments of {counts.tolist()} "
        detail += f"in steps of {block}"
        broken(ledger, Stage.PRE_PERMUTE, rank, "rows.m_indices", detail)


def _segments_due(subject: Subject, rank: int, counts: Tensor) -> Tensor:
    """[M] int64: the slot of every grouped row; -1 on padding, and behind the last segment."""
    layer, slots = subject.layer, torch.arange(len(counts))
    padding = rounded_up(counts, layer.row_alignment) - counts
    runs = torch.stack([slots, torch.full_like(slots, -1)], dim=1).flatten()
    segments = runs.repeat_interleave(torch.stack([counts, padding], dim=1).flatten())
    bound = rows_with_a_spare if layer.wide_segments else rows_at_most
    routes = len(subject.received_from[rank]) * layer.top_k
    unused = bound(routes, len(counts), layer.row_alignment) - len(segments)
    return torch.cat([segments, segments.new_full((unused,), -1)])


def rows_at_most(routes: int, slots: int, block: int) -> int:
    """Grouped rows that hold any distribution of ``routes`` over ``slots`` in whole blocks.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py::_get_compact_all_tokens.
    """
    started = min(routes, slots)
    return block * (started + (routes - started) // block)


def rows_with_a_spare(routes: int, slots: int, block: int) -> int:
    """Whole blocks for all ``routes`` in a row, and a spare one for each of ``slots``.

    Source: SGLang 0.5.21, deep_gemm_sm120.maybe_pre_permute.
    """
    return block * (-(-routes // block) + slots)

"""deepep_v2 to the grouped layouts and back, received rows being tokens or routes already."""

from typing import assert_never

import torch
from torch import Tensor

from moe.dispatched import DeepEpV2DispatchOutput, DeepEpV2ExpandedDispatchOutput
from moe.formats import GemmLayout
from moe.indices import align_counts
from moe.permute.context import PermuteContext
from moe.permute.deepep_normal import ep_scatter
from moe.row_kernels import TORCH_KERNELS, RowKernels
from moe.stages import (
    CombineInput,
    ContigInput,
    ExpandedRestore,
    Gemm2Output,
    MaskedInput,
    PrePermuteOutput,
    Restore,
    RunnerInput,
)


class SlabOverflowError(RuntimeError):
    """An expert has more rows than its slab."""


def pre_permute(
    sent: DeepEpV2DispatchOutput | DeepEpV2ExpandedDispatchOutput, context: PermuteContext
) -> PrePermuteOutput:
    """Rows of tokens to segments; rows of routes to slabs, or to segments where they lie.

    Dispatch has quantised, and says where segments end.

    Raises:
        SlabOverflowError: see ``expand_to_masked_slab``.

    Source: SGLang 0.5.21, pre_permute_deepep_v2_to_deep_gemm.
    """
    match sent:
        case DeepEpV2DispatchOutput():
            rows, output_index = ep_scatter_from_psum(
                sent.hidden_states, sent.hidden_states_scale, sent.topk_ids, sent.psum, context
            )
            restore = Restore(
                topk_ids=sent.topk_ids, topk_weights=sent.topk_weights, output_index=output_index
            )
            return PrePermuteOutput(rows=rows, restore=restore)
        case DeepEpV2ExpandedDispatchOutput():
            return PrePermuteOutput(
                rows=_expanded_rows(sent, context),
                restore=ExpandedRestore(psum=sent.psum, topk_weights=sent.topk_weights),
            )
        case _:
            assert_never(sent)


def post_permute(
    output: Gemm2Output, restore: Restore | ExpandedRestore, context: PermuteContext
) -> CombineInput:
    """Weights folded in: into a token's sum, or into each route's row.

    Source: SGLang 0.5.21, post_permute_deep_gemm_to_deepep_v2, ep_gather.
    """
    match restore:
        case Restore():
            partial = context.kernels.fold_topk_weights(
                output.output, restore.output_index, restore.topk_weights, restore.topk_ids >= 0
            )
        case ExpandedRestore():
            partial = _weighted_routes(output.output, restore, context)
        case _:
            assert_never(restore)
    return CombineInput(partial=partial)


def ep_scatter_from_psum(
    hidden_states: Tensor,
    scale: Tensor | None,
    topk_ids: Tensor,
    psum: Tensor,
    context: PermuteContext,
) -> tuple[ContigInput, Tensor]:
    """``ep_scatter`` to segments that end where ``psum`` [L] int32 says, padding included.

    Source: SGLang 0.5.21, ep_moe/kernels.py::ep_scatter_from_psum.
    """
    ends = psum.to(torch.int64)
    return ep_scatter(hidden_states, scale, topk_ids, ends.diff(prepend=ends.new_zeros(1)), context)


def ep_expand_init_m_indices_from_psum(psum: Tensor, num_rows: int, alignment: int) -> Tensor:
    """Expert of every expanded row: of whole segments, padding included; -1 behind the last.

    Args:
        psum: [L] int32, aligned start of each segment + its real routes.
        num_rows: C.
        alignment: rows.

    Returns:
        [C] int32

    Source: SGLang 0.5.21, ep_moe/kernels.py::ep_expand_init_m_indices_from_psum.
    """
    row = torch.arange(num_rows, device=psum.device)
    ends = align_counts(psum.to(torch.int64), alignment)
    expert = torch.searchsorted(ends, row, right=True).to(torch.int32)
    return expert.masked_fill(expert == psum.shape[0], -1)


def expand_to_masked_slab(
    sent: DeepEpV2ExpandedDispatchOutput, alignment: int, kernels: RowKernels = TORCH_KERNELS
) -> MaskedInput:
    """Each expert's expanded rows at the top of its slab, in their order.

    Raises:
        SlabOverflowError: an expert has more rows than a slab.

    Source: SGLang 0.5.21, ep_moe/kernels.py::expand_to_masked_slab.
    """
    counts = _route_counts(sent.psum, alignment)
    height, fullest = sent.masked_max_m, int(counts.max())
    if fullest > height:
        raise SlabOverflowError(
            f"local expert {int(counts.argmax())} has {fullest} rows, its slab {height}: psum is "
            f"{sent.psum.tolist()}"
        )
    source, places = _slab_places(sent.psum, height, alignment)
    scale, num_slabs = sent.hidden_states_scale, counts.shape[0]
    return MaskedInput(
        hidden_states=kernels.scatter_slabs(sent.hidden_states, source, places, num_slabs, height),
        hidden_states_scale=None
        if scale is None
        else kernels.scatter_slab_scales(scale, source, places, num_slabs, height),
        masked_m=counts.to(torch.int32),
        expected_m=sent.expected_m,
    )


def masked_slab_to_expand(
    slabs: Tensor,
    psum: Tensor,
    topk_weights: Tensor,
    alignment: int,
    kernels: RowKernels = TORCH_KERNELS,
) -> Tensor:
    """``expand_to_masked_slab`` undone, each row times its weight: fp32, one rounding to bf16.

    Args:
        slabs: [L, S, H] bf16.
        psum: [L] int32.
        topk_weights: [C] fp32.
        alignment: rows.
        kernels: who computes it.

    Returns:
        [C, H] bf16, poison in rows of no route.

    Source: SGLang 0.5.21, ep_moe/kernels.py::masked_slab_to_expand.
    """
    places, source = _slab_places(psum, slabs.shape[1], alignment)
    return kernels.weigh_rows(slabs.flatten(0, 1), source, places, topk_weights)


def _expanded_rows(sent: DeepEpV2ExpandedDispatchOutput, context: PermuteContext) -> RunnerInput:
    alignment = context.row_alignment
    match context.layout:
        case GemmLayout.MASKED:
            return expand_to_masked_slab(sent, alignment, context.kernels)
        case GemmLayout.CONTIG:
            return ContigInput(
                hidden_states=sent.hidden_states,
                hidden_states_scale=sent.hidden_states_scale,
                m_indices=ep_expand_init_m_indices_from_psum(
                    sent.psum, sent.hidden_states.shape[0], alignment
                ),
                live_rows=_expanded_places(sent.psum, alignment)[1],
            )
        case _:
            assert_never(context.layout)


def _weighted_routes(rows: Tensor, restore: ExpandedRestore, context: PermuteContext) -> Tensor:
    """[C, H] bf16; where rows stayed in place, the weight is rounded to bf16 in front of it."""
    match context.layout:
        case GemmLayout.MASKED:
            return masked_slab_to_expand(
                rows, restore.psum, restore.topk_weights, context.row_alignment, context.kernels
            )
        case GemmLayout.CONTIG:
            return rows * restore.topk_weights.to(torch.bfloat16)[:, None]
        case _:
            assert_never(context.layout)


def _segment_starts(psum: Tensor, alignment: int) -> Tensor:
    """[L] int64 first row of each expert's segment: behind the one before, rounded up."""
    ends = align_counts(psum.to(torch.int64), alignment)
    return torch.cat([ends.new_zeros(1), ends[:-1]])


def _route_counts(psum: Tensor, alignment: int) -> Tensor:
    """[L] int64 real rows of each segment; none where it ends before its start."""
    return (psum.to(torch.int64) - _segment_starts(psum, alignment)).clamp_min(0)


def _expanded_places(psum: Tensor, alignment: int) -> tuple[Tensor, Tensor]:
    """([V] local expert, [V] expanded row) of the V real rows, ascending."""
    counts = _route_counts(psum, alignment)
    experts = torch.arange(counts.shape[0], device=psum.device).repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    row_in_segment = torch.arange(experts.shape[0], device=psum.device) - first[experts]
    return experts, _segment_starts(psum, alignment)[experts] + row_in_segment


def _slab_places(psum: Tensor, height: int, alignment: int) -> tuple[Tensor, Tensor]:
    """([V] expanded row, [V] slab row counted over all slabs) of the V real rows."""
    experts, row = _expanded_places(psum, alignment)
    return row, experts * height + row - _segment_starts(psum, alignment)[experts]

"""standard to either grouped layout and back: both halves of one conversion.

The rows are quantised here, each token once; then each of its local routes gets a copy. The order
of an expert's routes is open upstream, so it is drawn.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from moe.dispatched import StandardDispatchOutput
from moe.formats import GemmLayout
from moe.indices import (
    capped_slab_height,
    ceil_div,
    compact_row_bound,
    pad_expert_counts,
    slab_height,
    wide_row_bound,
)
from moe.permute.context import PermuteContext
from moe.stages import (
    CombineInput,
    ContigInput,
    Gemm2Output,
    MaskedInput,
    PrePermuteOutput,
    Restore,
    RunnerInput,
)


def pre_permute(sent: StandardDispatchOutput, context: PermuteContext) -> PrePermuteOutput:
    """Quantise every row once, then copy it to each of its local experts.

    Source: SGLang 0.5.21, pre_permute_standard_to_deep_gemm.
    """
    return group_tokens(sent.hidden_states, sent.topk_ids, sent.topk_weights, context)


def group_tokens(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, context: PermuteContext
) -> PrePermuteOutput:
    """Rows of tokens to grouped rows, whatever brought them here.

    Args:
        hidden_states: [R, H] bf16.
        topk_ids: [R, K] int32 local experts; anything outside [0, L) is no route.
        topk_weights: [R, K] fp32.
        context: facts of the layer.
    """
    is_local = (topk_ids >= 0) & (topk_ids < context.num_local_experts)
    routes = _local_routes(hidden_states, topk_ids, is_local, context)
    rows: RunnerInput
    match context.layout:
        case GemmLayout.CONTIG:
            rows, output_index = _to_segments(routes, topk_ids, context)
        case GemmLayout.MASKED:
            rows, output_index = _to_slabs(routes, topk_ids, context)
        case _:
            assert_never(context.layout)
    restore = Restore(
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        output_index=output_index.to(torch.int32),
    )
    return PrePermuteOutput(rows=rows, restore=restore)


def post_permute(output: Gemm2Output, restore: Restore, context: PermuteContext) -> CombineInput:
    """``routed_scaling_factor`` times the weighted sum of a token's local routes.

    Slots ascending, all in fp32, one rounding to bf16; zero for a token without a local route.
    Wide segments store the sum first and round again behind the factor.

    Source: SGLang 0.5.21, post_permute_deep_gemm_to_standard, post_reorder_deepgemm;
    deep_gemm_sm120.maybe_post_permute.
    """
    factor = context.routed_scaling_factor
    partial = context.kernels.fold_topk_weights(
        output.output.flatten(0, -2),
        restore.output_index,
        restore.topk_weights,
        restore.output_index >= 0,
        factor=1.0 if context.wide_segments else factor,
    )
    if context.wide_segments:
        partial = (partial.to(torch.float32) * factor).to(torch.bfloat16)
    return CombineInput(partial=partial)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _LocalRoutes:
    """The N routes to this rank's experts, by token, slots ascending.

    token    [N] int64  whose route it is
    slot     [N] int64  which of its routes
    experts  [N] int64  local expert
    counts   [L] int64  routes to each expert
    rows     [R, H]     of the tokens, quantised where the recipe does
    scale    their scales, or None
    """

    token: Tensor
    slot: Tensor
    experts: Tensor
    counts: Tensor
    rows: Tensor
    scale: Tensor | None


def _local_routes(
    hidden_states: Tensor, topk_ids: Tensor, is_local: Tensor, context: PermuteContext
) -> _LocalRoutes:
    token, slot = is_local.nonzero(as_tuple=True)
    experts = topk_ids[token, slot].to(torch.int64)
    quantized = context.quantize(hidden_states) if context.quantize else None
    return _LocalRoutes(
        token=token,
        slot=slot,
        experts=experts,
        counts=torch.bincount(experts, minlength=context.num_local_experts),
        rows=quantized.values if quantized else hidden_states,
        scale=quantized.scale if quantized else None,
    )


def _to_segments(
    routes: _LocalRoutes, topk_ids: Tensor, context: PermuteContext
) -> tuple[ContigInput, Tensor]:
    """Segments end to end in as many rows as any routing needs; the row of every route.

    Deterministic inference zeroes the rows of quantised recipes alone, and no wide segments.
    """
    bound = wide_row_bound if context.wide_segments else compact_row_bound
    num_rows = bound(topk_ids.numel(), context.num_local_experts, context.row_alignment)
    padded = pad_expert_counts(routes.counts, context.row_alignment, num_rows)
    kernels = context.kernels
    output_index = kernels.scatter_index(topk_ids, padded, context.slot_order_seed)
    places = output_index[routes.token, routes.slot].to(torch.int64)
    m_indices = torch.full((num_rows,), -1, dtype=torch.int32, device=places.device)
    m_indices[places] = routes.experts.to(torch.int32)
    zeroes = context.zeroes_padding and routes.scale is not None and not context.wide_segments
    rows = ContigInput(
        hidden_states=kernels.scatter_rows(
            routes.rows, routes.token, places, num_rows, zeroes_padding=zeroes
        ),
        hidden_states_scale=None
        if routes.scale is None
        else kernels.scatter_scales(
            routes.scale, routes.token, places, num_rows, zeroes_padding=zeroes
        ),
        m_indices=m_indices,
        live_rows=places.sort().values,
    )
    return rows, output_index


def _to_slabs(
    routes: _LocalRoutes, topk_ids: Tensor, context: PermuteContext
) -> tuple[MaskedInput, Tensor]:
    """A slab an expert, higher than there are tokens; rows of routes count all slabs.

    As upstream, nothing looks for an overflow: a token's experts are distinct, so none can be.
    Capped slabs are as high as the fullest expert needs.
    """
    num_slabs, num_tokens = context.num_local_experts, topk_ids.shape[0]
    height = slab_height(num_tokens)
    if context.caps_slabs:
        height = capped_slab_height(num_tokens, int(routes.counts.max()))
    kernels = context.kernels
    heights = torch.full_like(routes.counts, height)
    output_index = kernels.scatter_index(topk_ids, heights, context.slot_order_seed)
    places = output_index[routes.token, routes.slot].to(torch.int64)
    rows = MaskedInput(
        hidden_states=kernels.scatter_slabs(routes.rows, routes.token, places, num_slabs, height),
        hidden_states_scale=None
        if routes.scale is None
        else kernels.scatter_slab_scales(routes.scale, routes.token, places, num_slabs, height),
        masked_m=routes.counts.to(torch.int32),
        expected_m=max(1, ceil_div(topk_ids.numel(), context.num_experts)),
    )
    return rows, output_index

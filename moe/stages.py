"""The value each stage hands to the next one: frozen, printable, one type a meaning.

Letters: T tokens of this rank, R received rows, M grouped rows, H hidden, I intermediate,
E experts, L local experts, K top-k, G scale groups.
"""

from dataclasses import dataclass
from typing import NewType

from torch import Tensor

LogicalIds = NewType("LogicalIds", Tensor)
"""Expert ids as the router counts them: one a distinct expert of the model."""

PhysicalIds = NewType("PhysicalIds", Tensor)
"""Expert ids as the ranks count them: one a slot that holds an expert's weights."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerRows:
    """Rows that enter or leave the layer on this rank.

    hidden_states  [T, H]  bf16
    """

    hidden_states: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TopKOutput:
    """Routes of this rank's tokens.

    logits        [T, E]  fp32
    topk_ids      [T, K]  int32  logical expert, -1 = dropped
    topk_weights  [T, K]  fp32   after renormalisation, before ``routed_scaling_factor``
    """

    logits: Tensor
    topk_ids: LogicalIds
    topk_weights: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DispatchHandle:
    """What combine needs to undo a dispatch.

    num_tokens               T
    source_rank, source_row  [R] int64  whose token a received row is, and which
    sent_row                 [N] int64  rows this rank sent, destination by destination
    send_counts, recv_counts  [P] int64  rows for and from every rank of the group
    """

    num_tokens: int
    source_rank: Tensor
    source_row: Tensor
    sent_row: Tensor
    send_counts: Tensor
    recv_counts: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpNormalDispatchOutput:
    """Rows received from all ranks, each token once a destination rank, order unspecified.

    wire, wire_scale           [T, H], [T, G or ceil(G/4)]  what this rank put on the wire
    hidden_states              [R, H]  bf16, or e4m3 with ``hidden_states_scale``
    topk_ids                   [R, K]  int64  local expert, -1 = on another rank
    topk_weights               [R, K]  fp32
    num_recv_tokens_per_expert [L]     int64  routes, each rounded up to the alignment
    """

    wire: Tensor
    wire_scale: Tensor | None
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: Tensor
    handle: DispatchHandle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ContigInput:
    """Expert segments end to end, each padded to as many rows as dispatch announced.

    hidden_states        [M, H]  bf16 or e4m3; padding rows hold poison
    hidden_states_scale  [M, G] fp32 or [M, ceil(G/4)] int32, or None
    m_indices            [M]  int32  local expert; padding carries its segment's expert
    live_rows            [V]  int64  rows that hold a route, ascending; the rest is padding
    """

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    m_indices: Tensor
    live_rows: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Restore:
    """What post-permute needs to find the routes of a received row again.

    topk_ids      [R, K]  int64  local expert, -1 = not here
    topk_weights  [R, K]  fp32
    output_index  [R, K]  int64  grouped row of the route, -1 = not here
    """

    topk_ids: Tensor
    topk_weights: Tensor
    output_index: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrePermuteOutput:
    """Grouped rows and the way back."""

    rows: ContigInput
    restore: Restore


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gemm1Output:
    """gate_up  [M, 2I]  bf16, gate columns first."""

    gate_up: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ActivationOutput:
    """Input of the second GEMM.

    activation           [M, I]  bf16, before quantisation; padding rows hold poison
    hidden_states        [M, I]  e4m3, or ``activation`` itself
    hidden_states_scale  as in ``ContigInput``
    """

    activation: Tensor
    hidden_states: Tensor
    hidden_states_scale: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gemm2Output:
    """output  [M, H]  bf16, one row a route, unweighted."""

    output: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CombineInput:
    """What travels back.

    partial          [R, H]  bf16
    pending_weights  [R, K]  fp32 that combine still has to apply; None = folded in already
    """

    partial: Tensor
    pending_weights: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CombineOutput:
    """routed  [T, H]  bf16, sum over all ranks, without the scaling factor."""

    routed: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SharedExpertOutput:
    """The dense path of every token through the shared expert, step by step.

    input, input_scale            [T, H]   e4m3 with scale, or bf16
    gate_up                       [T, 2S]  bf16, S = intermediate size of the shared expert
    activation                    [T, S]   bf16
    hidden_states, hidden_states_scale  [T, S]  quantised activation
    output                        [T, H]   bf16
    """

    input: Tensor
    input_scale: Tensor | None
    gate_up: Tensor
    activation: Tensor
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    output: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TailOutput:
    """Routed and shared branch added: ``output`` [T, H] bf16."""

    shared: SharedExpertOutput | None
    output: Tensor

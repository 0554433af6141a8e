"""The value each stage hands to the next one: frozen, printable, one type a meaning.

Letters: O own rows of this rank, T rows its layer works on, R received rows, M grouped rows,
H hidden, I intermediate, E experts, L local experts, K top-k, G scale groups.
"""

from dataclasses import dataclass
from typing import NewType

from torch import Tensor

LogicalIds = NewType("LogicalIds", Tensor)
"""Expert ids as the router counts them: one a distinct expert of the model."""

PhysicalIds = NewType("PhysicalIds", Tensor)
"""Expert ids as the ranks count them: one a slot that holds an expert's weights."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GlueInOutput:
    """Rows the layer works on, after whatever gathered or split them.

    own               [O, H]  bf16   rows the rank entered with
    hidden_states     [T, H]  bf16
    input_ids         [T]     int64  vocabulary ids, for hash layers; 0 on padding rows
    wire, wire_scale  [O, H] e4m3, [O, H/128] fp32: own rows as an fp8 gather sent them
    """

    own: Tensor
    hidden_states: Tensor
    input_ids: Tensor | None = None
    wire: Tensor | None = None
    wire_scale: Tensor | None = None


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
class ContigInput:
    """Expert segments end to end, each padded to a multiple of the row alignment.

    hidden_states        [M, H]  bf16 or e4m3; padding rows hold poison, or zero where asked for
    hidden_states_scale  [M, G] fp32 or [M, ceil(G/4)] int32, or None
    m_indices            [M]  int32  local expert; padding carries its segment's expert where
                         dispatch announced the counts (deepep_normal, deepep_v2), else -1
    live_rows            [V]  int64  rows that hold a route, ascending; the rest is padding
    """

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    m_indices: Tensor
    live_rows: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MaskedInput:
    """One slab of S rows an expert, the first ``masked_m`` of each real, the rest poison.

    hidden_states        [L, S, H]  bf16 or e4m3
    hidden_states_scale  [L, S, G] fp32, or [L, S, ceil(G/4)] int32 with S fastest, or None
    masked_m             [L]  int32  real rows of each slab
    expected_m           tuning hint; changes no number
    """

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    masked_m: Tensor
    expected_m: int


RunnerInput = ContigInput | MaskedInput
"""Rows in front of the experts; what comes out of them lies in the same layout."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Restore:
    """What post-permute needs to find the routes of a received row again.

    topk_ids      [R, K]  int64 (standard: int32)  local expert, -1 = not here
    topk_weights  [R, K]  fp32
    output_index  [R, K]  of the same dtype  grouped row of the route, or ``expert * S + row`` of
                  a slab; -1 = not here
    """

    topk_ids: Tensor
    topk_weights: Tensor
    output_index: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SlabRestore:
    """Slabs go back as they came; combine applies the weights.

    topk_weights  [T, K]  fp32  of this rank's own tokens
    """

    topk_weights: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpandedRestore:
    """What post-permute needs to find the routes of expanded rows again.

    psum          [L]  int32  aligned start of each expert's segment + its real routes
    topk_weights  [C]  fp32   weight of every expanded row's route
    """

    psum: Tensor
    topk_weights: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PrePermuteOutput:
    """Grouped rows and the way back."""

    rows: RunnerInput
    restore: Restore | SlabRestore | ExpandedRestore


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gemm1Output:
    """gate_up  [M, 2I] or [L, S, 2I]  bf16, gate columns first."""

    gate_up: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ActivationOutput:
    """Input of the second GEMM.

    activation           [M, I] or [L, S, I]  before quantisation, padding rows hold poison: bf16,
                         or fp32 where a masked layout quantises without rounding to bf16 first
    hidden_states        the same shape  e4m3, or ``activation`` itself
    hidden_states_scale  as in ``RunnerInput``
    """

    activation: Tensor
    hidden_states: Tensor
    hidden_states_scale: Tensor | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gemm2Output:
    """output  [M, H] or [L, S, H]  bf16, one row a route, unweighted."""

    output: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CombineInput:
    """What travels back.

    partial          [R, H]  bf16, a row for each received one; of a low-latency dispatch the
                     slabs [L, S, H], of an expanded one [C, H]
    pending_weights  [T, K]  fp32 that combine still has to apply; None = folded in already
    """

    partial: Tensor
    pending_weights: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CombineOutput:
    """The routed branch behind the dispatcher.

    routed  [T, H]  bf16: the sum over all ranks without the scaling factor; behind ``flashinfer``
            with it; behind ``standard`` this rank's own routes alone, with the factor
    """

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
    """Routed and shared branch added.

    shared   the shared expert as far as this rank computes it; None: not at all, or not here
    output   [T, H]  bf16
    summand  [T, H]  bf16, what this rank gives to the sum over the ranks; None: combine summed
    reduced  [T, H]  bf16, that sum where the tail takes it; None: combine or glue_out takes it
    """

    shared: SharedExpertOutput | None
    output: Tensor
    summand: Tensor | None = None
    reduced: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GlueOutOutput:
    """This rank's own rows, finished.

    hidden_states  [O, H]  bf16
    returned       [O, H]  bf16, before a local shared expert is added; None where there is none
    shared         the local shared expert over own rows, or None
    """

    hidden_states: Tensor
    returned: Tensor | None = None
    shared: SharedExpertOutput | None = None

"""What each dispatcher hands over to its rank, and the way back that its ``combine`` takes.

Letters: T rows of this rank, R received rows, H hidden, K top-k, G scale groups, P ranks of the
group, L local experts, S rows of a slab, C rows of an expanded buffer, N rows sent.
"""

from dataclasses import dataclass

from torch import Tensor


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
class StandardDispatchOutput:
    """Nothing moves: every rank keeps its rows and learns which routes are its own.

    physical_ids   [T, K]  int32  expert slot of each route, over all ranks; -1 = dropped
    hidden_states  [T, H]  bf16
    topk_ids       [T, K]  int32  local expert slot, -1 = on another rank or dropped
    topk_weights   [T, K]  fp32
    """

    physical_ids: Tensor
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    handle: None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpNormalDispatchOutput:
    """Rows received from all ranks, each token once a destination rank, order unspecified.

    physical_ids               [T, K]  int32  expert slot of each route, over all ranks
    wire, wire_scale           [T, H], [T, G or ceil(G/4)]  what this rank put on the wire
    hidden_states              [R, H]  bf16, or e4m3 with ``hidden_states_scale``
    topk_ids                   [R, K]  int64  local expert, -1 = on another rank
    topk_weights               [R, K]  fp32
    num_recv_tokens_per_expert [L]     int64  routes, each rounded up to the alignment
    """

    physical_ids: Tensor
    wire: Tensor
    wire_scale: Tensor | None
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: Tensor
    handle: DispatchHandle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LowLatencyHandle:
    """What a low-latency combine needs to undo a dispatch.

    topk_ids    [T, K]  int32  expert slots of this rank's tokens, over all ranks; -1 = dropped
    source_row  [L, S]  int32  row at its source that a slab row comes from; past the counts: poison
    begin, count  [L, P] int32  where the rows of each source rank lie in an expert's slab: chunks
                  end to end from row 0 on, sources in any order, and so the rows of a chunk
    """

    topk_ids: Tensor
    source_row: Tensor
    begin: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LowLatencyDispatchOutput:
    """One slab an expert, filled in order of arrival; one row a route, weights left to combine.

    S = ranks * the most rows that one may send.

    physical_ids         [T, K]     int32  expert slot of each route, over all ranks
    topk_weights         [T, K]     fp32   of this rank's own tokens
    hidden_states        [L, S, H]  bf16, or e4m3 with ``hidden_states_scale``
    hidden_states_scale  [L, S, G] fp32 or [L, S, ceil(G/4)] int32, S fastest either way; or None
    masked_m             [L]        int32  received rows of each slab; the rest holds anything
    expected_m           tuning hint; changes no number
    """

    physical_ids: Tensor
    topk_weights: Tensor
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    masked_m: Tensor
    expected_m: int
    handle: LowLatencyHandle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpV2Handle(DispatchHandle):
    """What combine needs to undo a dispatch of DeepEP v2; a row is a message here.

    A rank without tokens may have sent one message nevertheless, of a dummy in row 0.

    first_slot  [N]  int64  slot of the first expert that a sent row has at its destination
    """

    first_slot: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpV2DispatchOutput:
    """Not expanded: rows received from all ranks, each token once a destination rank.

    A rank without tokens sends a dummy, so that every rank hears of every other: a zero row with
    zero weights, routed to the first K expert slots of all.

    physical_ids      [T, K]  int32  expert slot of each route, over all ranks
    wire, wire_scale  [T, H], [T, G or ceil(G/4)]  what this rank put on the wire; no dummy
    hidden_states     [R, H]  bf16, or e4m3 with ``hidden_states_scale``
    topk_ids          [R, K]  int64  local expert, -1 = on another rank
    topk_weights      [R, K]  fp32
    psum              [L]     int32  aligned ends of the experts' segments: inclusive sums of
                              routes, each rounded up to the alignment
    """

    physical_ids: Tensor
    wire: Tensor
    wire_scale: Tensor | None
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    psum: Tensor
    handle: DeepEpV2Handle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpandedHandle:
    """What combine needs to undo an expanded dispatch.

    source_rank, source_row   [C] int64  whose token an expanded row is, and which; -1 = no route
    source_slot               [C] int64  which of its top-k slots; -1 = no route
    message                   [C] int64  received message that an expanded row was copied from; -1
    messages                  the R messages: each token once a destination rank
    """

    source_rank: Tensor
    source_row: Tensor
    source_slot: Tensor
    message: Tensor
    messages: DeepEpV2Handle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpV2ExpandedDispatchOutput:
    """Expanded: one row a route, by expert, in a buffer of fixed size C.

    Segments start at multiples of the alignment; rows of no route hold anything.

    physical_ids      [T, K]  int32  expert slot of each route, over all ranks
    wire, wire_scale  [T, H], [T, G or ceil(G/4)]  what this rank put on the wire
    hidden_states     [C, H]  bf16, or e4m3 with ``hidden_states_scale``
    topk_weights      [C]     fp32   weight of the row's route
    psum              [L]     int32  aligned start of each segment + its real routes
    masked_max_m      rows of a slab that holds whatever one expert can be sent
    expected_m        tuning hint; changes no number
    """

    physical_ids: Tensor
    wire: Tensor
    wire_scale: Tensor | None
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_weights: Tensor
    psum: Tensor
    masked_max_m: int
    expected_m: int
    handle: ExpandedHandle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlashInferHandle:
    """What combine needs to undo a one-sided dispatch.

    A token's message to a rank belongs to the slot of its first expert there; other slots have -1.

    target_rank  [T, K]  int32  place in the group of the rank that a slot's message went to
    send_index   [T, K]  int32  its row in what this rank wrote there
    counts       [P]     int64  rows received from each rank of the group
    """

    target_rank: Tensor
    send_index: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlashInferDispatchOutput:
    """Decode: room for M rows from each of P ranks, R = P * M, each token once a destination rank.

    M is the most rows that any rank has. Rows past a rank's count hold what an earlier forward
    left there.

    physical_ids   [T, K]  int32  expert slot of each route, over all ranks
    hidden_states  [R, H]  bf16
    topk_ids       [R, K]  int32  expert slots over all ranks, those of other ranks included;
                           -1 = dropped, or past the count
    topk_weights   [R, K]  fp32
    """

    physical_ids: Tensor
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    handle: FlashInferHandle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GatheredHandle:
    """What combine needs to scatter gathered rows.

    counts  [P] int64  rows of each rank of the group
    """

    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlashInferGatheredOutput:
    """Prefill: the rows of all P ranks in group order, on every rank.

    physical_ids   [T, K]  int32  expert slot of each of this rank's own routes, over all ranks
    hidden_states  [R, H]  bf16
    topk_ids       [R, K]  int32  local expert slot, -1 = on another rank or dropped
    topk_weights   [R, K]  fp32
    """

    physical_ids: Tensor
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    handle: GatheredHandle

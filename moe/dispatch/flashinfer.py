"""FlashInfer's one-sided all-to-all, emulated over ``Collectives``, and the gather of prefill.

In decode a rank writes each token once to every rank that owns one of its experts. In prefill all
ranks gather all rows, and partial results are scattered.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.dispatch.buffers import MessageBuffers
from moe.dispatch.payload import pack_columns, unpack_columns
from moe.dispatched import (
    FlashInferDispatchOutput,
    FlashInferGatheredOutput,
    FlashInferHandle,
    GatheredHandle,
)
from moe.formats import COMBINED_TOP_K, Stage
from moe.indices import arrival_numbers, exclusive_psum, local_ids
from moe.rows import take_rows
from moe.stages import CombineInput, CombineOutput, PhysicalIds
from topology.collectives import Collectives
from topology.mesh import Group

DECODE_COLLECTIVES: Final = (
    (Stage.DISPATCH, "all_to_all_v"),  # counts
    (Stage.DISPATCH, "all_to_all_v"),  # rows
    (Stage.COMBINE, "all_to_all_v"),  # partials
)
"""What every rank calls in a decode forward, in order."""

EXTEND_COLLECTIVES: Final = (
    (Stage.DISPATCH, "all_gather_v"),  # rows
    (Stage.DISPATCH, "all_gather_v"),  # ids
    (Stage.DISPATCH, "all_gather_v"),  # weights
    (Stage.COMBINE, "reduce_scatter_v"),  # partials
)
"""What every rank calls in a prefill forward, in order."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlashInferDispatcher:
    """Both halves of the one-sided exchange, for one rank.

    collectives        this rank's verbs
    group              the EP group, in EP order
    num_local_experts  experts a rank owns; owners are equal contiguous blocks of physical ids
    rows_per_rank      M, the most rows of any rank: what each may write to another
    buffers            the receive workspace, kept from forward to forward
    message_seed       order of what this rank writes to another: unspecified, so drawn

    Source: SGLang 0.5.21, token_dispatcher/flashinfer.py; FlashInfer, MoeAlltoAll.dispatch and
    combine. There a dropped route's -1 is divided in C, which sends its token to rank 0.
    """

    collectives: Collectives
    group: Group
    num_local_experts: int
    rows_per_rank: int
    buffers: MessageBuffers
    message_seed: int

    def dispatch(
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> FlashInferDispatchOutput:
        """Write every token, with all its ids and weights, to the ranks of its experts.

        Args:
            hidden_states: [T, H] bf16.
            topk_ids: [T, K] int32 physical experts, -1 = dropped.
            topk_weights: [T, K] fp32.
        """
        target_rank, send_index = self._messages(topk_ids)
        token, slot = (target_rank >= 0).nonzero(as_tuple=True)
        send_counts = self._send_counts(target_rank)
        place = _stream_places(target_rank[token, slot], send_index[token, slot], send_counts)
        sent_row = torch.empty_like(token)
        sent_row[place] = token
        columns = [take_rows(rows, sent_row) for rows in (hidden_states, topk_ids, topk_weights)]
        workspace, counts = self._write(pack_columns(columns), send_counts)
        hidden, ids, weights = unpack_columns(workspace, columns)  # copies, the workspace stays
        is_stale = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        is_stale[self._received_rows(counts)] = False
        return FlashInferDispatchOutput(
            physical_ids=topk_ids,
            hidden_states=hidden,
            topk_ids=ids.masked_fill(is_stale[:, None], -1),
            topk_weights=weights,
            handle=FlashInferHandle(target_rank=target_rank, send_index=send_index, counts=counts),
        )

    def combine(self, partials: CombineInput, handle: FlashInferHandle) -> CombineOutput:
        """Each rank's partial into the slot of its first expert; slots added as a tree in fp32.

        Args:
            partials: [R, H] bf16, weights and scaling factor folded in.
            handle: what dispatch returned.

        Raises:
            ValueError: no tree is known for this many slots.
        """
        assert partials.pending_weights is None, "weights are folded before this combine"
        send_counts = self._send_counts(handle.target_rank)
        returned = self.collectives.all_to_all_v(
            take_rows(partials.partial, self._received_rows(handle.counts)),
            handle.counts.tolist(),
            send_counts.tolist(),
            self.group,
        )
        at = (handle.target_rank >= 0).nonzero(as_tuple=True)
        place = _stream_places(handle.target_rank[at], handle.send_index[at], send_counts)
        shape = (*handle.target_rank.shape, returned.shape[1])
        slots = returned.new_zeros(shape, dtype=torch.float32)
        slots[at] = take_rows(returned, place).to(torch.float32)
        return CombineOutput(routed=tree_sum(slots).to(torch.bfloat16))

    def _messages(self, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
        """([T, K], [T, K]) int32 ``target_rank`` and ``send_index`` of the handle."""
        owner_TK = torch.div(topk_ids, self.num_local_experts, rounding_mode="floor")
        same_TKK = owner_TK[:, :, None] == owner_TK[:, None, :]
        is_repeat = same_TKK.tril(-1).any(-1)
        target_rank = owner_TK.masked_fill(is_repeat | (topk_ids < 0), -1)
        send_index = torch.full_like(target_rank, -1)
        at = (target_rank >= 0).nonzero(as_tuple=True)
        numbers = arrival_numbers(target_rank[at].to(torch.int64), self.message_seed)
        send_index[at] = numbers.to(send_index.dtype)
        return target_rank, send_index

    def _send_counts(self, target_rank: Tensor) -> Tensor:
        """[P] int64 messages to each rank."""
        return torch.bincount(target_rank[target_rank >= 0], minlength=len(self.group))

    def _write(self, messages: Tensor, send_counts: Tensor) -> tuple[Tensor, Tensor]:
        """The workspace once all ranks have written, and [P] int64 rows from each."""
        ones, group = [1] * len(self.group), self.group
        counts = self.collectives.all_to_all_v(send_counts[:, None], ones, ones, group)[:, 0]
        received = self.collectives.all_to_all_v(
            messages, send_counts.tolist(), counts.tolist(), group
        )
        num_rows = len(group) * self.rows_per_rank
        workspace = self.buffers.take(num_rows, messages.shape[1])
        workspace[self._received_rows(counts)] = received
        return workspace, counts

    def _received_rows(self, counts: Tensor) -> Tensor:
        """[N] int64 rows of the workspace that hold a message, rank after rank."""
        row = torch.arange(self.rows_per_rank, device=counts.device)
        is_written = row < counts[:, None]
        return is_written.flatten().nonzero()[:, 0]


def _stream_places(target_rank: Tensor, send_index: Tensor, send_counts: Tensor) -> Tensor:
    """[N] int64 place of messages in what a rank sends, destination after destination."""
    return exclusive_psum(send_counts)[target_rank.to(torch.int64)] + send_index


def tree_sum(slots: Tensor) -> Tensor:
    """Sum over the slots of a token, neighbours first: ``(a0 + a1) + (a2 + a3)``.

    Args:
        slots: [T, K, H] fp32; zero where a slot has nothing.

    Returns:
        [T, H] fp32; six slots add as ``((a0 + a1) + (a2 + a3)) + (a4 + a5)``.

    Raises:
        ValueError: K is none of ``COMBINED_TOP_K``.

    Source: FlashInfer, moeA2ACombineKernel.
    """
    if slots.shape[1] not in COMBINED_TOP_K:
        known = ", ".join(map(str, COMBINED_TOP_K))
        raise ValueError(
            f"flashinfer's combine has no tree for num_experts_per_tok {slots.shape[1]}; "
            f"known: {known}"
        )
    terms = list(slots.unbind(1))
    while len(terms) > 1:
        left_over = terms[-1:] if len(terms) % 2 else []
        pairs = zip(terms[::2], terms[1::2], strict=False)
        terms = [first + second for first, second in pairs] + left_over
    return terms[0]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlashInferGatherDispatcher:
    """Both halves of what prefill does instead, for one rank: gather all rows, scatter the sums.

    collectives        this rank's verbs
    group              the EP group, in EP order
    num_local_experts  experts a rank owns; owners are equal contiguous blocks of physical ids
    ep_rank            which block is this rank's
    counts             rows of each rank of the group

    Source: SGLang 0.5.21, token_dispatcher/flashinfer.py (extend).
    """

    collectives: Collectives
    group: Group
    num_local_experts: int
    ep_rank: int
    counts: tuple[int, ...]

    def dispatch(
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> FlashInferGatheredOutput:
        """Gather rows, ids and weights of all ranks, and make the ids local.

        Args:
            hidden_states: [T, H] bf16.
            topk_ids: [T, K] int32 physical experts, -1 = dropped.
            topk_weights: [T, K] fp32.
        """
        rows, ids, weights = (
            self.collectives.all_gather_v(tensor, self.counts, self.group)
            for tensor in (hidden_states, topk_ids, topk_weights)
        )
        first = self.ep_rank * self.num_local_experts
        return FlashInferGatheredOutput(
            physical_ids=topk_ids,
            hidden_states=rows,
            topk_ids=local_ids(ids, first, self.num_local_experts),
            topk_weights=weights,
            handle=GatheredHandle(counts=torch.tensor(self.counts, device=rows.device)),
        )

    def combine(self, partials: CombineInput, handle: GatheredHandle) -> CombineOutput:
        """This rank's rows of the sum over ranks: ascending, fp32 inside, one rounding.

        Args:
            partials: [R, H] bf16, weights and scaling factor folded in.
            handle: what dispatch returned.
        """
        assert partials.pending_weights is None, "weights are folded before this combine"
        counts = handle.counts.tolist()
        routed = self.collectives.reduce_scatter_v(partials.partial, counts, self.group)
        return CombineOutput(routed=routed)

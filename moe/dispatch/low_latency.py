"""DeepEP's low-latency mode over ``Collectives``: one message a route, one slab an expert.

Mooncake and NIXL keep the same contract. Messages land in a receive buffer with a place for
everything that any rank may send, and are packed from there by the counts beside them: what an
earlier use left in the buffer is still there.

Letters: T own tokens, K top-k, P ranks, L local experts, H hidden, G scale groups, N messages,
C the most rows that a rank may send, S = P * C rows of a slab.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.dispatch.buffers import Chunks, MessageBuffers
from moe.dispatch.payload import pack_columns, unpack_columns
from moe.dispatched import LowLatencyDispatchOutput, LowLatencyHandle
from moe.fold import fold_topk_weights
from moe.formats import ScaleFormat, Stage
from moe.indices import drawn_order, exclusive_psum
from moe.poison import poison
from moe.quant.fp8 import LOW_LATENCY_AMAX_FLOOR, quantize_groups
from moe.row_counts import low_latency_slab_problem, rows_expected
from moe.rows import take_rows
from moe.slabs import spread_slabs
from moe.stages import CombineInput, CombineOutput, PhysicalIds
from topology.collectives import Collectives
from topology.mesh import Group

COLLECTIVES: Final = (
    (Stage.DISPATCH, "all_to_all_v"),  # counts
    (Stage.DISPATCH, "all_to_all_v"),  # rows of routes
    (Stage.COMBINE, "all_to_all_v"),  # expert outputs
)
"""What every rank calls in a forward, in order."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LowLatencyDispatcher:
    """Both halves of the exchange, for one rank.

    collectives        this rank's verbs
    group              the EP group, in EP order
    num_local_experts  L, expert slots of a rank; owners are equal contiguous blocks
    capacity           C, rows that a rank may send in one dispatch; equal on all ranks
    wire_format        scales of an fp8 wire; NONE moves bf16
    buffers            two receive buffers: dispatch takes one, combine the next
    arrival_seed       order of messages and of their sources: unspecified, so drawn

    Raises:
        ValueError: slabs of P * C rows, no multiple of 4.

    Source: DeepEP Buffer.low_latency_dispatch / low_latency_combine; SGLang 0.5.21,
    token_dispatcher/deepep.py, mooncake.py and nixl.py.
    """

    collectives: Collectives
    group: Group
    num_local_experts: int
    capacity: int
    wire_format: ScaleFormat
    buffers: MessageBuffers
    arrival_seed: int

    def __post_init__(self) -> None:
        problem = low_latency_slab_problem(len(self.group), self.capacity)
        if problem is not None:
            raise ValueError(problem)

    @property
    def _slab_rows(self) -> int:
        return len(self.group) * self.capacity

    def dispatch(
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> LowLatencyDispatchOutput:
        """Send the row of every route to the rank of its expert slot; weights stay here.

        Args:
            hidden_states: [T, H] bf16.
            topk_ids: [T, K] int32 physical experts, distinct in a row, -1 = dropped.
            topk_weights: [T, K] fp32.

        Raises:
            ValueError: more rows than the buffers take from one rank.
        """
        if len(hidden_states) > self.capacity:
            raise ValueError(
                f"{len(hidden_states)} rows to dispatch where a rank may send {self.capacity}; "
                "moe.switches.max_dispatch_tokens_per_rank raises that"
            )
        token, expert = self._messages(topk_ids)
        columns = self._columns(hidden_states, token)
        inbox = self._received(columns, expert)
        begin = self._chunk_begins(inbox.counts)
        cell, number = _each_of(inbox.counts)
        places = cell // len(self.group) * self._slab_rows + begin.flatten()[cell] + number
        arrived = take_rows(inbox.rows, cell * self.capacity + number)
        hidden, source_row, *scale = unpack_columns(arrived, columns)
        return LowLatencyDispatchOutput(
            physical_ids=topk_ids,
            topk_weights=topk_weights,
            hidden_states=spread_slabs(hidden, places, self.num_local_experts, self._slab_rows),
            hidden_states_scale=self._scale_slabs(scale[0], places) if scale else None,
            masked_m=inbox.counts.sum(1).to(torch.int32),
            expected_m=rows_expected(
                topk_ids.numel(), len(self.group), len(self.group) * self.num_local_experts
            ),
            handle=LowLatencyHandle(
                topk_ids=topk_ids,
                source_row=self._source_slabs(source_row[:, 0], places),
                begin=begin.to(torch.int32),
                count=inbox.counts.to(torch.int32),
            ),
        )

    def combine(self, partials: CombineInput, handle: LowLatencyHandle) -> CombineOutput:
        """Bring every route's row home and add them up, slots ascending, fp32, one rounding.

        Args:
            partials: [L, S, H] bf16 slabs, unweighted, and the [T, K] weights of own tokens.
            handle: what dispatch returned.
        """
        assert partials.pending_weights is not None, "this combine applies the weights"
        owner = handle.topk_ids[handle.topk_ids >= 0] // self.num_local_experts
        columns = self._columns_back(partials.partial, handle)
        received = self.collectives.all_to_all_v(
            pack_columns(columns),
            handle.count.sum(0).tolist(),
            torch.bincount(owner, minlength=len(self.group)).tolist(),
            self.group,
        )
        rows, place = unpack_columns(received, columns)
        by_expert = self._home(rows, place[:, 0])
        token = torch.arange(len(handle.topk_ids), device=handle.topk_ids.device)[:, None]
        return CombineOutput(
            routed=fold_topk_weights(
                by_expert,
                handle.topk_ids.to(torch.int64) * self.capacity + token,
                partials.pending_weights,
                handle.topk_ids >= 0,
            )
        )

    def _messages(self, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(token [N], expert slot [N]) of every route, expert by expert, each in a drawn order."""
        token, slot = (topk_ids >= 0).nonzero(as_tuple=True)
        expert = topk_ids[token, slot].to(torch.int64)
        order = drawn_order(len(expert), self.arrival_seed, expert.device)
        order = order[torch.argsort(expert[order], stable=True)]
        return token[order], expert[order]

    def _columns(self, hidden_states: Tensor, token: Tensor) -> list[Tensor]:
        """What the messages carry: data, source row, scales; each token is quantised once."""
        if self.wire_format is ScaleFormat.NONE:
            return [take_rows(hidden_states, token), token[:, None]]
        wire = quantize_groups(hidden_states, self.wire_format, amax_floor=LOW_LATENCY_AMAX_FLOOR)
        return [take_rows(wire.values, token), token[:, None], take_rows(wire.scale, token)]

    def _received(self, columns: Sequence[Tensor], expert: Tensor) -> Chunks:
        """Exchange counts and messages; each goes to its (expert, source, number) of the buffer.

        As upstream, nothing looks for a chunk that overflows: a token's experts are distinct.
        """
        ranks, experts = len(self.group), self.num_local_experts
        sent = torch.bincount(expert, minlength=ranks * experts).view(ranks, experts)
        heard = self.collectives.all_to_all_v(sent, [1] * ranks, [1] * ranks, self.group)
        received = self.collectives.all_to_all_v(
            pack_columns(columns), sent.sum(1).tolist(), heard.sum(1).tolist(), self.group
        )
        inbox = self.buffers.take_chunks((experts, ranks), self.capacity, received.shape[1])
        inbox.counts.copy_(heard.T)
        cell, number = _each_of(heard)
        chunk = cell % experts * ranks + cell // experts
        inbox.rows[chunk * self.capacity + number] = received
        return inbox

    def _chunk_begins(self, counts: Tensor) -> Tensor:
        """[L, P] first slab row of every source's chunk: end to end, in a drawn order."""
        generator = torch.Generator().manual_seed(self.arrival_seed)
        drawn = torch.rand(counts.shape, generator=generator, device="cpu")
        order = drawn.argsort(1).to(counts.device)
        ordered = counts.gather(1, order)
        return torch.empty_like(counts).scatter_(1, order, ordered.cumsum(1) - ordered)

    def _scale_slabs(self, scale: Tensor, places: Tensor) -> Tensor:
        """[L, S, G or ceil(G/4)] with S fastest: row-major ``scale`` at ``places``, poison else."""
        shape = (self.num_local_experts, scale.shape[1], self._slab_rows)
        slabs = poison(scale.new_empty(shape)).transpose(1, 2)
        slabs[places // self._slab_rows, places % self._slab_rows] = scale
        return slabs

    def _source_slabs(self, source_row: Tensor, places: Tensor) -> Tensor:
        """[L, S] int32 with ``source_row`` [N] at ``places``, poison elsewhere."""
        shape = (self.num_local_experts, self._slab_rows)
        slabs = poison(source_row.new_empty(shape, dtype=torch.int32))
        slabs.view(-1)[places] = source_row.to(torch.int32)
        return slabs

    def _columns_back(self, slabs: Tensor, handle: LowLatencyHandle) -> list[Tensor]:
        """Rows [N, H] and their places at home [N, 1], source by source.

        A place counts ``expert slot of all ranks * C + row at its source``.
        """
        cell, number = _each_of(handle.count.T)
        source, expert = cell // self.num_local_experts, cell % self.num_local_experts
        row = handle.begin[expert, source] + number
        first = self.group.index(self.collectives.rank) * self.num_local_experts
        place = (first + expert) * self.capacity + handle.source_row[expert, row]
        return [take_rows(slabs.flatten(0, 1), expert * slabs.shape[1] + row), place[:, None]]

    def _home(self, rows: Tensor, place: Tensor) -> Tensor:
        """[P * L * C, H] bf16, the next buffer with ``rows`` [N, H] at ``place`` [N]."""
        num_places = self.num_local_experts * self._slab_rows
        buffer = self.buffers.take(num_places, rows.shape[1] * rows.element_size())
        home = buffer.view(rows.dtype)
        home[place] = rows
        return home


def _each_of(counts: Tensor) -> tuple[Tensor, Tensor]:
    """(cell [N], number inside it [N]) of N things, when ``counts`` of any shape are in a cell."""
    flat = counts.flatten().to(torch.int64)
    cell = torch.arange(len(flat), device=flat.device).repeat_interleave(flat)
    return cell, torch.arange(len(cell), device=flat.device) - exclusive_psum(flat)[cell]

"""DeepEP's normal mode, emulated over ``Collectives``: one row for each (token, rank).

A token goes once to every rank that owns one of its experts, with its ids made local there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from moe.dispatch.payload import pack_columns, unpack_columns
from moe.formats import Stage
from moe.indices import align_counts
from moe.quant.fp8 import QuantizedRows
from moe.quant.ue8m0 import mn_major
from moe.rows import take_rows
from moe.stages import (
    CombineInput,
    CombineOutput,
    DeepEpNormalDispatchOutput,
    DispatchHandle,
    PhysicalIds,
)
from topology.collectives import Collectives
from topology.mesh import Group

COLLECTIVES: Final = (
    (Stage.DISPATCH, "all_to_all_v"),  # counts
    (Stage.DISPATCH, "all_to_all_v"),  # rows
    (Stage.COMBINE, "all_to_all_v"),  # partials
)
"""What every rank calls in a forward, in order."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeepEpNormalDispatcher:
    """Both halves of the exchange, for one rank.

    collectives        this rank's verbs
    group              the EP group, in EP order
    num_local_experts  experts a rank owns; owners are equal contiguous blocks of physical ids
    expert_alignment   rows to which an expert's announced count is rounded up
    quantize           rows -> codes and scales where the wire is fp8; None keeps bf16
    arrival_seed       order of received rows: unspecified by the contract, so drawn

    Source: DeepEP Buffer.dispatch / Buffer.combine; SGLang 0.5.21, token_dispatcher/deepep.py.
    """

    collectives: Collectives
    group: Group
    num_local_experts: int
    expert_alignment: int
    quantize: Callable[[Tensor], QuantizedRows] | None
    arrival_seed: int

    def dispatch(
        self, hidden_states: Tensor, topk_ids: PhysicalIds, topk_weights: Tensor
    ) -> DeepEpNormalDispatchOutput:
        """Send every token to the ranks of its experts.

        Args:
            hidden_states: [T, H] bf16.
            topk_ids: [T, K] int32 physical experts, -1 = dropped.
            topk_weights: [T, K] fp32.
        """
        quantized = self.quantize(hidden_states) if self.quantize else None
        wire = quantized.values if quantized else hidden_states
        wire_scale = quantized.scale if quantized else None
        destination, sent_row = self._destinations(topk_ids)
        ids, weights = self._localize(topk_ids[sent_row], topk_weights[sent_row], destination)
        send_counts, recv_counts, routes = self._exchange_counts(destination, ids)
        columns = [take_rows(wire, sent_row), ids, weights, sent_row[:, None]]
        if wire_scale is not None:
            columns.append(take_rows(wire_scale, sent_row))
        received = self.collectives.all_to_all_v(
            pack_columns(columns), send_counts.tolist(), recv_counts.tolist(), self.group
        )
        order = self._arrival_order(received.shape[0])
        hidden, local_ids, local_weights, source_row, *scale = unpack_columns(
            take_rows(received, order), columns
        )
        return DeepEpNormalDispatchOutput(
            physical_ids=topk_ids,
            wire=wire,
            wire_scale=wire_scale,
            hidden_states=hidden,
            hidden_states_scale=_as_stored(scale[0]) if scale else None,
            topk_ids=local_ids,
            topk_weights=local_weights,
            num_recv_tokens_per_expert=align_counts(routes, self.expert_alignment),
            handle=DispatchHandle(
                num_tokens=hidden_states.shape[0],
                source_rank=torch.tensor(self.group).repeat_interleave(recv_counts)[order],
                source_row=source_row[:, 0],
                sent_row=sent_row,
                send_counts=send_counts,
                recv_counts=recv_counts,
            ),
        )

    def combine(self, partials: CombineInput, handle: DispatchHandle) -> CombineOutput:
        """Bring every partial back and add them up, ranks ascending, fp32, one rounding.

        Args:
            partials: [R, H] bf16 in the order dispatch handed the rows over, weights folded in.
            handle: what dispatch returned.
        """
        assert partials.pending_weights is None, "weights are folded before this combine"
        returned = self.collectives.all_to_all_v(
            take_rows(partials.partial, _stream_order(handle)),
            handle.recv_counts.tolist(),
            handle.send_counts.tolist(),
            self.group,
        )
        total = returned.new_zeros((handle.num_tokens, returned.shape[1]), dtype=torch.float32)
        total.index_add_(0, handle.sent_row, returned.to(torch.float32))  # rank after rank
        return CombineOutput(routed=total.to(torch.bfloat16))

    def _destinations(self, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rank in group [N], row [N]) of every message, destination by destination."""
        owner_TK = torch.div(topk_ids, self.num_local_experts, rounding_mode="floor")
        ranks = torch.arange(len(self.group), device=topk_ids.device)
        is_sent_PT = (owner_TK[None] == ranks[:, None, None]).any(-1)
        destination, sent_row = is_sent_PT.nonzero(as_tuple=True)
        return destination, sent_row

    def _localize(
        self, topk_ids: Tensor, topk_weights: Tensor, destination: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids as the destination counts them, -1 and weight 0 for experts of other ranks."""
        local = topk_ids.to(torch.int64) - destination[:, None] * self.num_local_experts
        is_local = (local >= 0) & (local < self.num_local_experts) & (topk_ids >= 0)
        return local.masked_fill(~is_local, -1), topk_weights.masked_fill(~is_local, 0)

    def _exchange_counts(self, destination: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows to each rank [P], rows from each rank [P], routes to each local expert [L]."""
        ranks, experts = len(self.group), self.num_local_experts
        rows = torch.bincount(destination, minlength=ranks)
        is_local = ids >= 0
        cell = (destination[:, None] * experts + ids)[is_local]
        routes = torch.bincount(cell, minlength=ranks * experts).view(ranks, experts)
        announced = torch.cat([rows[:, None], routes], dim=1)
        heard = self.collectives.all_to_all_v(announced, [1] * ranks, [1] * ranks, self.group)
        return rows, heard[:, 0], heard[:, 1:].sum(0)

    def _arrival_order(self, num_rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.arrival_seed)
        return torch.randperm(num_rows, generator=generator)


def _stream_order(handle: DispatchHandle) -> Tensor:
    """Received rows as they left: source rank by source rank, each in its own token order."""
    if handle.source_row.numel() == 0:
        return handle.source_row
    span = int(handle.source_row.max()) + 1
    return torch.argsort(handle.source_rank * span + handle.source_row)


def _as_stored(scale: Tensor) -> Tensor:
    """fp32 scales row-major, packed UE8M0 words MN-major."""
    return mn_major(scale) if scale.dtype == torch.int32 else scale

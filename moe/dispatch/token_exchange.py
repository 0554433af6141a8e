"""One message for each (token, rank): the exchange under DeepEP's normal mode and DeepEP v2.

A token goes once to every rank that owns one of its experts, with its ids made local there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.dispatch.payload import pack_columns, unpack_columns
from moe.dispatched import DispatchHandle
from moe.indices import drawn_order
from moe.quant.ue8m0 import mn_major
from moe.rows import take_rows
from topology.collectives import Collectives
from topology.mesh import Group


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReceivedTokens:
    """The R tokens that arrived at one rank, in a drawn order.

    hidden_states        [R, H]  as on the wire
    hidden_states_scale  its scales, fp32 row-major or packed UE8M0 MN-major; or None
    topk_ids             [R, K]  int64  local expert, -1 = on another rank
    topk_weights         [R, K]  fp32   0 where the id is -1
    num_routes           [L]     int64  routes to each local expert
    handle               what came from whom and went to whom
    """

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    num_routes: Tensor
    handle: DispatchHandle


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenExchange:
    """Both directions, for one rank: counts and then rows out, a row for each of them back.

    collectives        this rank's verbs
    group              the EP group, in EP order
    num_local_experts  experts a rank owns; owners are equal contiguous blocks of physical ids
    arrival_seed       order of received rows: unspecified by the contract, so drawn

    Source: DeepEP Buffer.dispatch / Buffer.combine, ElasticBuffer.dispatch / ElasticBuffer.combine.
    """

    collectives: Collectives
    group: Group
    num_local_experts: int
    arrival_seed: int

    def send(
        self, wire: Tensor, wire_scale: Tensor | None, topk_ids: Tensor, topk_weights: Tensor
    ) -> ReceivedTokens:
        """Send every token to the ranks of its experts.

        Args:
            wire: [T, H] bf16, or e4m3 with scales.
            wire_scale: its scales, or None.
            topk_ids: [T, K] int32 physical experts, -1 = dropped.
            topk_weights: [T, K] fp32.
        """
        destination, sent_row = self._destinations(topk_ids)
        ids, weights = self._localize(topk_ids[sent_row], topk_weights[sent_row], destination)
        send_counts, recv_counts, num_routes = self._exchange_counts(destination, ids)
        columns = [take_rows(wire, sent_row), ids, weights, sent_row[:, None]]
        if wire_scale is not None:
            columns.append(take_rows(wire_scale, sent_row))
        received = self.collectives.all_to_all_v(
            pack_columns(columns), send_counts.tolist(), recv_counts.tolist(), self.group
        )
        order = drawn_order(len(received), self.arrival_seed, received.device)
        hidden, local_ids, local_weights, source_row, *scale = unpack_columns(
            take_rows(received, order), columns
        )
        return ReceivedTokens(
            hidden_states=hidden,
            hidden_states_scale=_as_stored(scale[0]) if scale else None,
            topk_ids=local_ids,
            topk_weights=local_weights,
            num_routes=num_routes,
            handle=DispatchHandle(
                num_tokens=wire.shape[0],
                source_rank=self._members(order.device).repeat_interleave(recv_counts)[order],
                source_row=source_row[:, 0],
                sent_row=sent_row,
                send_counts=send_counts,
                recv_counts=recv_counts,
            ),
        )

    def send_back(self, rows: Tensor, handle: DispatchHandle) -> Tensor:
        """Return one row for each received one.

        Args:
            rows: [R, H] in the order in which ``send`` handed the tokens over.
            handle: of that ``send``.

        Returns:
            [N, H] what became of the N messages of this rank, in the order of ``sent_row``.
        """
        return self.collectives.all_to_all_v(
            take_rows(rows, _stream_order(handle)),
            handle.recv_counts.tolist(),
            handle.send_counts.tolist(),
            self.group,
        )

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

    def _members(self, device: torch.device) -> Tensor:
        """[P] int64 ranks of the group, in EP order."""
        return torch.tensor(self.group, device=device)


def _stream_order(handle: DispatchHandle) -> Tensor:
    """Received rows as they left: source rank by source rank, each in its own token order."""
    if handle.source_row.numel() == 0:
        return handle.source_row
    span = int(handle.source_row.max()) + 1
    return torch.argsort(handle.source_rank * span + handle.source_row)


def _as_stored(scale: Tensor) -> Tensor:
    """fp32 scales row-major, packed UE8M0 words MN-major."""
    return mn_major(scale) if scale.dtype == torch.int32 else scale

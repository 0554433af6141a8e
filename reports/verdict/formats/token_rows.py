"""Formats whose received rows are tokens, each with the ids of its routes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import PartialStores, Terms, weighted_sum
from reports.verdict.band import fp32_noise, once_stored
from reports.verdict.compared import check_stored
from reports.verdict.formats.exchange import routes_to_owner
from reports.verdict.formats.view import Axes
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows, take_rows
from reports.verdict.subject import RankRoutes, Subject

TOKEN_ROWS: Final[Mapping[Stage, Mapping[str, Axes]]] = MappingProxyType(
    {
        Stage.PRE_PERMUTE: {
            "restore.topk_ids": ("R", "K"),
            "restore.topk_weights": ("R", "K"),
            "restore.output_index": ("R", "K"),
        },
        Stage.POST_PERMUTE: {"partial": ("R", "D")},
    }
)
"""What every such format leaves behind dispatch."""


class TokenRowsView:
    """See ``FormatView``: pre-permute leaves an index of routes, post-permute adds them up."""

    quantised: Sequence[str] = ()
    folds_factor = False
    stores_weights = False
    low_latency_wire = False
    partials = PartialStores.RANK

    def id_limits(self, subject: Subject) -> Mapping[str, int]:
        """Ids of received rows are local slots."""
        return {"topk_ids": subject.layer.slots_per_rank}

    def local_ids(self, subject: Subject, rank: int) -> Tensor:
        """[R, K] int64: slots of this rank that the received rows name; others as they may be."""
        return subject.stage(Stage.DISPATCH, rank)["topk_ids"].to(torch.int64)

    def routes(self, subject: Subject, rank: int) -> RankRoutes:
        """By the received ids; ids outside this rank's slots are none."""
        ids, source = self.local_ids(subject, rank), subject.received_from[rank]
        experts = torch.tensor(subject.layer.local_experts(rank))
        is_route = (ids >= 0) & (ids < len(experts)) & (source >= 0)[:, None]
        received, slot = is_route.nonzero(as_tuple=True)
        local = ids[received, slot]
        index = subject.stage(Stage.PRE_PERMUTE, rank)["restore.output_index"]
        return RankRoutes(
            received=received,
            row=index[received, slot].to(torch.int64),
            local=local,
            rows=Rows(
                rank=torch.full_like(received, rank),
                token=subject.layer_rows.token[source[received]],
                slot=slot,
                expert=experts[local],
            ),
        )

    def combined(self, subject: Subject, rank: int) -> tuple[Tensor, Tensor]:
        """By the ids that go with the way back."""
        ids = subject.stage(Stage.PRE_PERMUTE, rank)["restore.topk_ids"].to(torch.int64)
        is_route = (ids >= 0) & (ids < subject.layer.slots_per_rank)
        is_route &= (subject.received_from[rank] >= 0)[:, None]
        received, slot = is_route.nonzero(as_tuple=True)
        return received, ids[received, slot]

    def routes_due(self, subject: Subject, rank: int) -> Tensor:
        """A route is due on the rank that owns its slot, wherever its token is."""
        return routes_to_owner(subject, rank)

    def live_rows_due(self, subject: Subject, rank: int) -> Tensor:
        """Those that the way back names."""
        index = subject.stage(Stage.PRE_PERMUTE, rank)["restore.output_index"].to(torch.int64)
        return index[index >= 0].sort().values

    def check_restore(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """The way back is as dispatched."""
        sent, traced = subject.stage(Stage.DISPATCH, rank), subject.stage(Stage.PRE_PERMUTE, rank)
        ids = self.local_ids(subject, rank).to(traced["restore.topk_ids"].dtype)
        for name, want in (("topk_ids", ids), ("topk_weights", sent["topk_weights"])):
            ledger.moved(
                Stage.PRE_PERMUTE,
                f"restore.{name}",
                subject.received_rows(rank),
                got=traced[f"restore.{name}"],
                want=want,
            )

    def check_post_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Weighted sum of a received row's routes, times the factor, as often rounded as due."""
        factor = subject.layer.factor if self.folds_factor else 1.0
        for rank in subject.ranks:
            got = subject.stage(Stage.POST_PERMUTE, rank)["partial"].to(torch.float64)
            value, noise = _scaled(_folded(subject, rank, got.shape), factor, subject.layer)
            check_stored(
                ledger,
                Stage.POST_PERMUTE,
                "partial",
                subject.received_rows(rank),
                got=got,
                want=value,
                noise=noise,
            )


def _scaled(sums: Terms, factor: float, layer: JudgedLayer) -> tuple[Tensor, Tensor]:
    """([R, H] ``factor`` times the sums, its error before it is stored)."""
    if layer.wide_segments:  # the sum is stored in front of the factor
        stored, width = once_stored(sums.value, fp32_noise(sums.magnitude, layer.top_k))
        value, error = factor * stored, abs(factor) * width
        return value, error + fp32_noise(value.abs() + error, 1)
    value = factor * sums.value
    # The products, their additions, the factor's product.
    roundings = layer.top_k + (0 if factor == 1.0 else 1)
    return value, fp32_noise(factor * sums.magnitude, roundings)


def _folded(subject: Subject, rank: int, shape: torch.Size) -> Terms:
    """[R, H] weighted sums of the traced expert outputs that the traced indices name."""
    restore = subject.stage(Stage.PRE_PERMUTE, rank)
    expert_rows = subject.grouped(Stage.GEMM2, rank, "output")
    index = restore["restore.output_index"].to(torch.int64)
    is_route = (restore["restore.topk_ids"] >= 0) & (index >= 0) & (index < len(expert_rows))
    at, top_k = is_route.nonzero(as_tuple=True), index.shape[1]
    outputs = torch.zeros(shape[0], top_k, shape[1], dtype=torch.float64)
    weights = torch.zeros(shape[0], top_k, dtype=torch.float64)
    outputs[at] = take_rows(expert_rows, index[at]).to(torch.float64)
    weights[at] = restore["restore.topk_weights"][at].to(torch.float64)
    return weighted_sum(outputs, weights)

"""What deepep_v2 promises with expansion: one row a route, by expert, in a buffer of fixed size."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import PartialStores, round_bf16
from reports.verdict.band import fp32_noise, once_stored
from reports.verdict.captured import CapturedTensors
from reports.verdict.compared import check_stored
from reports.verdict.formats.exchange import arrivals_due, check_routed, messages_due
from reports.verdict.formats.exchanged_tokens import (
    check_wire,
    expect_sources,
    layer_places,
    token_calls,
)
from reports.verdict.formats.expanded_contracts import (
    check_expanded_rows,
    check_masked_slabs,
    check_routes_arrived,
    check_segments_in_place,
)
from reports.verdict.formats.expanded_segments import ExpandedSegments
from reports.verdict.formats.grouped_rows import check_copied
from reports.verdict.formats.route_rows import RouteRowsView
from reports.verdict.formats.routes import local_slots
from reports.verdict.formats.view import Axes, DueCall
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows, take_rows
from reports.verdict.stage_checks import StageChecks, check_moved
from reports.verdict.subject import RankRoutes, Subject

WEIGHTS = "topk_weights"


class DeepEpV2ExpandedView(RouteRowsView):
    """See ``FormatView``: received rows are copied to slabs, and back with their weights."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {
            Stage.DISPATCH: {
                "physical_ids": ("T", "K"),
                "wire": ("T", "D"),
                "hidden_states": ("R", "D"),
                "topk_weights": ("R",),
                "psum": ("L",),
                "handle.source_rank": ("R",),
                "handle.source_row": ("R",),
                "handle.source_slot": ("R",),
            },
            Stage.PRE_PERMUTE: {"restore.psum": ("L",), "restore.topk_weights": ("R",)},
            Stage.POST_PERMUTE: {"partial": ("R", "D")},
        }
    )
    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {
            (Stage.DISPATCH, "topk_weights"): torch.float32,
            (Stage.DISPATCH, "psum"): torch.int32,
            (Stage.PRE_PERMUTE, "rows.m_indices"): torch.int32,
            (Stage.PRE_PERMUTE, "rows.masked_m"): torch.int32,
        }
    )
    quantised: Sequence[str] = ("wire", "hidden_states")
    partials = PartialStores.ROUTE

    def received_from(self, subject: Subject, rank: int) -> Tensor:
        """By rank and row in the handle; -1 where rank, row and slot are.

        Raises:
            UnreadableTraceError: an expanded row names no route of any rank.
        """
        traced = subject.stage(Stage.DISPATCH, rank)
        source, row, slot = (traced[f"handle.source_{name}"] for name in ("rank", "row", "slot"))
        place = layer_places(subject, source, row)
        is_route = (place >= 0) & (slot >= 0) & (slot < subject.layer.top_k)
        is_none = (source == -1) & (row == -1) & (slot == -1)
        expect_sources(subject, rank, is_route | is_none)
        return place

    def routes(self, subject: Subject, rank: int) -> RankRoutes:
        """Rows that have a source and lie in a segment, whose expert is theirs."""
        segments = self.segments(subject, rank, Stage.DISPATCH, "psum")
        received, local = _real_rows(subject, rank, segments)
        return RankRoutes(
            received=received,
            row=self.grouped_row(subject, rank, segments, received),
            local=local,
            rows=_coordinates(subject, rank, received, local),
        )

    def segments(self, subject: Subject, rank: int, stage: Stage, name: str) -> ExpandedSegments:
        """Where a traced psum says that experts' rows lie."""
        num_rows = len(subject.received_from[rank])
        psum = subject.stage(stage, rank)[name]
        return ExpandedSegments.of(psum, num_rows, subject.layer.row_alignment)

    def grouped_row(
        self, subject: Subject, rank: int, segments: ExpandedSegments, received: Tensor
    ) -> Tensor:
        """[N] grouped row of each expanded row [N], -1 = none: in its slab, in the same order."""
        height = subject.stage(Stage.PRE_PERMUTE, rank)["rows.hidden_states"].shape[1]
        return segments.slab_row(received, height)

    def combined(self, subject: Subject, rank: int) -> tuple[Tensor, Tensor]:
        """By the psum that goes with the way back."""
        segments = self.segments(subject, rank, Stage.PRE_PERMUTE, "restore.psum")
        return _real_rows(subject, rank, segments)

    def calls_due(self, subject: Subject, rank: int) -> Sequence[DueCall]:
        """Counts, then rows, each token once to a rank; on the way back a sum for each."""
        sent, returned = messages_due(subject, rank), int(arrivals_due(subject, rank).sum())
        return token_calls(subject, rank, sent, returned)

    def check_arrivals(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Each route has a row once, on the rank that owns its slot, and on no other."""
        check_routes_arrived(subject, rank, ledger)

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """The buffer's size, the ends of its segments, and slabs of their rows."""
        segments = self.segments(subject, rank, Stage.DISPATCH, "psum")
        check_expanded_rows(subject, rank, segments, ledger)
        check_masked_slabs(subject, rank, segments, ledger)

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """What went on the wire by the quantiser rule; routes' rows and weights are what was sent.

        A row's slot names the expert in whose segment it lies.
        """
        sent = check_wire(subject, ledger)
        physical = subject.layer_tensor(Stage.DISPATCH, "physical_ids")
        topk_weights = subject.layer_tensor(Stage.ROUTE, "topk_weights")
        for rank in subject.ranks:
            routes = subject.routes[rank]
            source, slot = subject.received_from[rank][routes.received], routes.rows.slot
            traced = _received(subject, rank, routes.received)
            arrived = StageChecks(ledger, Stage.DISPATCH, subject.layer, routes.rows)
            check_moved(arrived, "hidden_states", traced, sent, source)
            local = local_slots(subject.layer, rank, physical[source, slot])
            weights = subject.stage(Stage.DISPATCH, rank)[WEIGHTS][routes.received]
            for name, got, want in (
                ("handle.source_slot", routes.local, local),
                (WEIGHTS, weights, topk_weights[source, slot]),
            ):
                ledger.moved(
                    Stage.DISPATCH, name, routes.rows, got=got[:, None], want=want[:, None]
                )

    def check_pre_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Every route's grouped row is the received row; the way back is as dispatched."""
        for rank in subject.ranks:
            placed = subject.placed[rank]
            sent = subject.stage(Stage.DISPATCH, rank)
            check_copied(subject, rank, ledger)
            for name, rows, at in (
                ("psum", _experts(subject, rank), slice(None)),
                (WEIGHTS, placed.rows, placed.received),
            ):
                got = subject.stage(Stage.PRE_PERMUTE, rank)[f"restore.{name}"][at, None]
                ledger.moved(
                    Stage.PRE_PERMUTE, f"restore.{name}", rows, got=got, want=sent[name][at, None]
                )

    def check_post_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Each route's expert output times its weight, stored by itself."""
        for rank in subject.ranks:
            segments = self.segments(subject, rank, Stage.PRE_PERMUTE, "restore.psum")
            received, local = _real_rows(subject, rank, segments)
            outputs = subject.grouped(Stage.GEMM2, rank, "output")
            row = self.grouped_row(subject, rank, segments, received)
            exists = (row >= 0) & (row < len(outputs))
            received, local, row = received[exists], local[exists], row[exists]
            weights = subject.stage(Stage.PRE_PERMUTE, rank)["restore.topk_weights"][received]
            want, noise = self.weighted(
                take_rows(outputs, row).to(torch.float64), weights.to(torch.float64)[:, None]
            )
            partial = subject.stage(Stage.POST_PERMUTE, rank)["partial"]
            check_stored(
                ledger,
                Stage.POST_PERMUTE,
                "partial",
                _coordinates(subject, rank, received, local),
                got=take_rows(partial, received).to(torch.float64),
                want=want,
                noise=noise,
            )

    def weighted(self, outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """([N, H] weighted expert outputs, their error before they are stored): an fp32 product."""
        want = outputs * weights
        return want, fp32_noise(want.abs(), 1)

    def check_combine(self, subject: Subject, ledger: Ledger) -> None:
        """A token's routes on a rank added and stored, then those sums of all ranks, in fp32."""
        shape = (len(subject.layer_rows), subject.layer.expert_hidden_size)
        want, magnitude, noise = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        for rank in subject.ranks:
            received = (subject.received_from[rank] >= 0).nonzero()[:, 0]
            source = subject.received_from[rank][received]
            partial = subject.stage(Stage.POST_PERMUTE, rank)["partial"]
            terms = take_rows(partial, received).to(torch.float64)
            on_rank = torch.zeros_like(want).index_add_(0, source, terms)
            size = torch.zeros_like(want).index_add_(0, source, terms.abs_())
            stored, width = once_stored(on_rank, fp32_noise(size, subject.layer.top_k))
            want += stored
            noise += width
            magnitude += stored.abs() + width
        noise += fp32_noise(magnitude, min(subject.layer.top_k, subject.layer.world_size))
        check_routed(subject, ledger, want, noise)


class DeepEpV2ExpandedContigView(DeepEpV2ExpandedView):
    """The same where rows stay in place: segments with padding, and weights rounded to bf16."""

    stores_weights = True

    def grouped_row(
        self, subject: Subject, rank: int, segments: ExpandedSegments, received: Tensor
    ) -> Tensor:
        """Expanded rows are the grouped rows."""
        return received

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """The buffer's size, the ends of its segments, and their experts on every row of it."""
        segments = self.segments(subject, rank, Stage.DISPATCH, "psum")
        check_expanded_rows(subject, rank, segments, ledger)
        check_segments_in_place(subject, rank, segments, ledger)

    def weighted(self, outputs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The product of two bf16 numbers has no error in fp32."""
        want = outputs * round_bf16(weights)
        return want, torch.zeros_like(want)


def _real_rows(subject: Subject, rank: int, segments: ExpandedSegments) -> tuple[Tensor, Tensor]:
    """([N] expanded row, [N] local slot) of the rows of segments that have a source."""
    is_real = (segments.slot >= 0) & (subject.received_from[rank] >= 0)
    received = is_real.nonzero()[:, 0]
    return received, segments.slot[received]


def _coordinates(subject: Subject, rank: int, received: Tensor, local: Tensor) -> Rows:
    """Of expanded rows [N] with a source, in the segments of local slots [N]."""
    return Rows(
        rank=torch.full_like(received, rank),
        token=subject.layer_rows.token[subject.received_from[rank][received]],
        slot=subject.stage(Stage.DISPATCH, rank)["handle.source_slot"][received],
        expert=torch.tensor(subject.layer.local_experts(rank))[local],
    )


def _experts(subject: Subject, rank: int) -> Rows:
    """Coordinates of a rank's L expert slots."""
    experts = torch.tensor(subject.layer.local_experts(rank))
    none = torch.full_like(experts, -1)
    return Rows(rank=torch.full_like(experts, rank), token=none, slot=none, expert=experts)


def _received(subject: Subject, rank: int, at: Tensor) -> Mapping[str, Tensor]:
    """Codes and scales of the received rows ``at``."""
    traced = subject.stage(Stage.DISPATCH, rank)
    names = ("hidden_states", "hidden_states_scale")
    rows = {name: take_rows(traced[name], at) for name in names if name in traced}
    return CapturedTensors(Stage.DISPATCH, rows)

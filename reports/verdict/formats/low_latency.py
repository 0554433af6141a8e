"""What the low-latency formats promise: one row a route, in slabs, weights left to combine.

Whose row it is follows from the handle: the chunk of a source, and a row number at that source.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from moe.formats import ScaleFormat, Stage
from moe.golden import LOW_LATENCY_AMAX_FLOOR, PartialStores
from reports.verdict.band import fp32_noise
from reports.verdict.captured import where_captured
from reports.verdict.formats.copies import check_copies
from reports.verdict.formats.exchange import Arrival, check_routed, exchange_calls, report_arrival
from reports.verdict.formats.grouped_rows import check_copied, check_quantised
from reports.verdict.formats.low_latency_slabs import check_slabs, slots_called_for, source_ranks
from reports.verdict.formats.route_rows import RouteRowsView
from reports.verdict.formats.routes import local_slots
from reports.verdict.formats.view import BF16_BYTES, FP32_BYTES, ID_BYTES, Axes, DueCall, FormatView
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import MOVES, Ledger
from reports.verdict.rows import Rows, cat_rows, take_rows
from reports.verdict.rules import QUANTISER
from reports.verdict.stage_checks import StageChecks
from reports.verdict.subject import RankRoutes, Subject


class LowLatencyView(RouteRowsView):
    """See ``FormatView``; the wire is quantised, so slabs go on as they came."""

    shapes: Mapping[Stage, Mapping[str, Axes]] = MappingProxyType(
        {
            Stage.DISPATCH: {
                "physical_ids": ("T", "K"),
                "topk_weights": ("T", "K"),
                "hidden_states": ("L", "S", "D"),
                "masked_m": ("L",),
                "handle.topk_ids": ("T", "K"),
                "handle.source_row": ("L", "S"),
                "handle.begin": ("L", "P"),
                "handle.count": ("L", "P"),
            },
            Stage.PRE_PERMUTE: {"restore.topk_weights": ("T", "K")},
            Stage.POST_PERMUTE: {"partial": ("L", "S", "D"), "pending_weights": ("T", "K")},
        }
    )
    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {
            (Stage.DISPATCH, "topk_weights"): torch.float32,
            (Stage.DISPATCH, "masked_m"): torch.int32,
            (Stage.DISPATCH, "handle.topk_ids"): torch.int32,
            (Stage.DISPATCH, "handle.source_row"): torch.int32,
            (Stage.DISPATCH, "handle.begin"): torch.int32,
            (Stage.DISPATCH, "handle.count"): torch.int32,
            (Stage.PRE_PERMUTE, "rows.masked_m"): torch.int32,
            (Stage.PRE_PERMUTE, "restore.topk_weights"): torch.float32,
            (Stage.POST_PERMUTE, "pending_weights"): torch.float32,
        }
    )

    quantised: Sequence[str] = ("hidden_states",)
    partials = PartialStores.NOTHING
    low_latency_wire = True

    def received_from(self, subject: Subject, rank: int) -> Tensor:
        """By the chunk that a row lies in; -1 as well where its source has no such row."""
        source = source_ranks(subject, rank)
        row = subject.stage(Stage.DISPATCH, rank)["handle.source_row"].flatten().to(torch.int64)
        num_rows = torch.tensor([len(tokens) for tokens in subject.layer_tokens])
        exists = (source >= 0) & (row >= 0) & (row < num_rows[source])
        return torch.where(exists, torch.tensor(subject.layer_starts)[source] + row, -1)

    def routes(self, subject: Subject, rank: int) -> RankRoutes:
        """Rows that some slot of their source called for; of several alike, slots ascending."""
        source, local = self._arrived(subject, rank)
        received = (subject.received_from[rank] >= 0).nonzero()[:, 0]
        slot = slots_called_for(subject, rank, source, local)
        is_route = slot >= 0
        received, local, source = received[is_route], local[is_route], source[is_route]
        return RankRoutes(
            received=received,
            row=received,
            local=local,
            rows=Rows(
                rank=torch.full_like(received, rank),
                token=subject.layer_rows.token[source],
                slot=slot[is_route],
                expert=torch.tensor(subject.layer.local_experts(rank))[local],
            ),
        )

    def _arrived(self, subject: Subject, rank: int) -> tuple[Tensor, Tensor]:
        """(place among ``layer_rows`` [N], local slot [N]) of every slab row that has a source."""
        source = subject.received_from[rank]
        height = subject.stage(Stage.DISPATCH, rank)["hidden_states"].shape[1]
        received = (source >= 0).nonzero()[:, 0]
        return source[received], received // height

    def calls_due(self, subject: Subject, rank: int) -> Sequence[DueCall]:
        """A count for each slot of all ranks, a row for each route, and each row's output back."""
        layer = subject.layer
        ids = subject.stage(Stage.DISPATCH, rank)["physical_ids"]
        sent = int(((ids >= 0) & (ids < len(layer.slot_experts))).sum())
        returned = int(self.routes_due(subject, rank).sum())
        return exchange_calls(
            subject,
            rank,
            counts=len(layer.slot_experts) * ID_BYTES,
            rows=sent * (self.data_bytes(layer) + ID_BYTES),
            returned=returned * (layer.expert_hidden_size * BF16_BYTES + ID_BYTES),
        )

    def data_bytes(self, layer: JudgedLayer) -> int:
        """Codes of one row and their scales."""
        scale_format, group_size = layer.scales_of(Stage.DISPATCH, "hidden_states")
        width, groups = layer.expert_hidden_size, -(-layer.expert_hidden_size // group_size)
        is_fp32 = scale_format is ScaleFormat.FP32
        return width + FP32_BYTES * (groups if is_fp32 else -(-groups // 4))

    def check_arrivals(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Each row arrives in a slab as often as its ids name the slab's slot: once, or not."""
        slots, num_rows = subject.layer.slots_per_rank, len(subject.layer_rows)
        source, local = self._arrived(subject, rank)
        ids = local_slots(subject.layer, rank, subject.layer_tensor(Stage.DISPATCH, "physical_ids"))
        called = (torch.arange(num_rows)[:, None] * slots + ids)[ids >= 0]
        got, due = (
            torch.bincount(cell, minlength=num_rows * slots).view(num_rows, slots)
            for cell in (source * slots + local, called)
        )
        wrong = (got != due).nonzero()
        if wrong.numel():
            row, slot = wrong[0].tolist()
            where = Arrival(
                rank=rank,
                tensor="handle.source_row",
                row=row,
                rows=len(wrong),
                expert=subject.layer.local_experts(rank)[slot],
            )
            report_arrival(subject, ledger, where, int(got[row, slot]), int(due[row, slot]))

    def check_groups(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """Counts, chunks and sources of the slabs."""
        check_slabs(subject, rank, self.routes_due(subject, rank), ledger)

    def check_dispatch(self, subject: Subject, ledger: Ledger) -> None:
        """Every route's row is its source's, as the wire stores it; ids and weights stayed."""
        rows = subject.layer_rows
        for name, stage, origin in (
            ("topk_weights", Stage.ROUTE, "topk_weights"),
            ("handle.topk_ids", Stage.DISPATCH, "physical_ids"),
        ):
            with where_captured(ledger, f"dispatch/{name}", MOVES):
                got, want = (
                    subject.layer_tensor(*key) for key in ((Stage.DISPATCH, name), (stage, origin))
                )
                ledger.moved(Stage.DISPATCH, name, rows, got=got, want=want)
        routes = Rows.cat([one.rows for one in subject.routes])
        source = torch.cat([subject.received_from[r][subject.routes[r].row] for r in subject.ranks])
        values = _received(subject, "hidden_states")
        has_scales = "hidden_states_scale" in subject.stage(Stage.DISPATCH, 0)
        scale = _received(subject, "hidden_states_scale") if has_scales else None
        x = subject.dispatched_rows(subject.ranks)
        checks = StageChecks(ledger, Stage.DISPATCH, subject.layer, routes)
        self.check_wire(checks, values, scale, x, source)

    def check_wire(
        self, checks: StageChecks, values: Tensor, scale: Tensor | None, x: Tensor, source: Tensor
    ) -> None:
        """Rows [N, H] that left as ``x[source]``: by the quantiser rule, and quantised once."""
        floor = LOW_LATENCY_AMAX_FLOOR
        checks.quantised("hidden_states", values, scale, x[source], amax_floor=floor)
        if checks.layer.wire_format is ScaleFormat.FP32 and scale is not None:
            check_copies(checks, values, scale, x, source, floor)

    def check_pre_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Every route's row stands where it stood; weights stayed."""
        for rank in subject.ranks:
            with where_captured(ledger, "pre_permute/rows.hidden_states", MOVES, QUANTISER):
                self.check_grouped(subject, rank, ledger)
            with where_captured(ledger, "pre_permute/restore.topk_weights", MOVES):
                ledger.moved(
                    Stage.PRE_PERMUTE,
                    "restore.topk_weights",
                    subject.rows_of([rank]),
                    got=subject.stage(Stage.PRE_PERMUTE, rank)["restore.topk_weights"],
                    want=subject.stage(Stage.DISPATCH, rank)["topk_weights"],
                )

    def check_grouped(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """The grouped rows of routes are the received ones, or those quantised again."""
        if subject.layer.requantises:
            check_quantised(subject, rank, ledger)
        else:
            check_copied(subject, rank, ledger)

    def check_post_permute(self, subject: Subject, ledger: Ledger) -> None:
        """Expert outputs and weights go on as they are."""
        with where_captured(ledger, "post_permute/partial", MOVES):
            ledger.moved(
                Stage.POST_PERMUTE,
                "partial",
                subject.route_rows,
                got=subject.route_tensor(Stage.POST_PERMUTE, "partial"),
                want=subject.route_tensor(Stage.GEMM2, "output"),
            )
        ledger.moved(
            Stage.POST_PERMUTE,
            "pending_weights",
            subject.layer_rows,
            got=subject.layer_tensor(Stage.POST_PERMUTE, "pending_weights"),
            want=subject.layer_tensor(Stage.PRE_PERMUTE, "restore.topk_weights"),
        )

    def check_combine(self, subject: Subject, ledger: Ledger) -> None:
        """Weighted sum of a row's routes at home, slots ascending, in fp32, rounded once."""
        source = torch.cat([subject.received_from[r][subject.placed[r].row] for r in subject.ranks])
        weights = subject.layer_tensor(Stage.POST_PERMUTE, "pending_weights").to(torch.float64)
        partial = subject.route_tensor(Stage.POST_PERMUTE, "partial").to(torch.float64)
        terms = weights[source, subject.route_rows.slot][:, None] * partial
        shape = (len(subject.layer_rows), subject.layer.expert_hidden_size)
        value = torch.zeros(shape, dtype=torch.float64).index_add_(0, source, terms)
        magnitude = torch.zeros(shape, dtype=torch.float64).index_add_(0, source, terms.abs_())
        noise = fp32_noise(magnitude, subject.layer.top_k)  # a product each, and their additions
        check_routed(subject, ledger, value, noise)


class LowLatencyBf16WireView(LowLatencyView):
    """The same with bf16 on the wire: what a recipe quantises, pre-permute does."""

    stored_as: Mapping[tuple[Stage, str], torch.dtype] = MappingProxyType(
        {**LowLatencyView.stored_as, (Stage.DISPATCH, "hidden_states"): torch.bfloat16}
    )
    quantised: Sequence[str] = ()
    low_latency_wire = False

    def data_bytes(self, layer: JudgedLayer) -> int:
        """One bf16 row."""
        return layer.expert_hidden_size * BF16_BYTES

    def check_wire(
        self, checks: StageChecks, values: Tensor, scale: Tensor | None, x: Tensor, source: Tensor
    ) -> None:
        """Rows [N, H] are ``x[source]``, bit for bit."""
        checks.ledger.moved(checks.stage, "hidden_states", checks.rows, got=values, want=x[source])

    def check_grouped(self, subject: Subject, rank: int, ledger: Ledger) -> None:
        """The grouped rows of routes are the received ones, by the recipe's usual quantiser."""
        check_quantised(subject, rank, ledger)


def low_latency_view(layer: JudgedLayer) -> FormatView:
    """The view of the layer's wire."""
    is_bf16 = layer.bf16_wire or layer.scale_format is ScaleFormat.NONE
    return LowLatencyBf16WireView() if is_bf16 else LowLatencyView()


def _received(subject: Subject, name: str) -> Tensor:
    """[N, C] rows of a tensor of dispatch, one for each rank's routes."""
    return cat_rows(
        [
            take_rows(subject.grouped(Stage.DISPATCH, rank, name), subject.routes[rank].row)
            for rank in subject.ranks
        ]
    )

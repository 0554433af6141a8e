"""What is judged: the traces of all ranks of one forward, mapped to canonical coordinates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe.batch import Batch
from moe.formats import GemmLayout, Stage
from moe.trace import RankTrace, StageTensors
from reports.verdict.captured import NotCapturedError
from reports.verdict.formats.view import FormatView
from reports.verdict.layer import JudgedLayer
from reports.verdict.route_values import RouteValues, in_parts
from reports.verdict.rows import Rows, cat_rows
from topology.sync import PADDING


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankRoutes:
    """The routes one rank computes: N of them.

    received  [N] int64  row among the received rows
    row       [N] int64  grouped row that the trace says holds it; -1 or too large = nowhere
    local     [N] int64  local expert slot
    rows      canonical coordinates
    """

    received: Tensor
    row: Tensor
    local: Tensor
    rows: Rows


class Subject:
    """One forward of all ranks, with its rows mapped.

    Args:
        layer: facts of the layer.
        view: what its dispatch format promises.
        batch: the global token list that went in.
        traces: one a rank, in rank order.
    """

    def __init__(
        self,
        layer: JudgedLayer,
        view: FormatView,
        batch: Batch,
        traces: Sequence[RankTrace],
    ) -> None:
        self.layer = layer
        self.view = view
        self.batch = batch
        self.hidden_states = batch.hidden_states
        self.traces = traces

    def stage(self, stage: Stage, rank: int) -> StageTensors:
        """Named tensors of a stage on a rank."""
        return self.traces[rank][stage]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.layer.world_size)

    # Rows a rank enters and leaves with, and rows its layer works on.

    @cached_property
    def own_tokens(self) -> list[Tensor]:
        """For each rank [O], the global token of every row it enters with; -1 = padding."""
        return [torch.tensor(row, dtype=torch.int64) for row in self.layer.sync.entry]

    @cached_property
    def layer_tokens(self) -> list[Tensor]:
        """For each rank [T], the global token of every row its layer works on; -1 = padding."""
        return [torch.tensor(row, dtype=torch.int64) for row in self.layer.sync.layer]

    def rows_of(self, ranks: Sequence[int]) -> Rows:
        """Layer rows of some ranks, in their order."""
        return Rows.cat(
            [Rows.of_rank(r, len(self.layer_tokens[r]), self.layer_tokens[r]) for r in ranks]
        )

    def own_rows_of(self, ranks: Sequence[int]) -> Rows:
        """Rows that some ranks enter and leave with, in their order."""
        return Rows.cat(
            [Rows.of_rank(r, len(self.own_tokens[r]), self.own_tokens[r]) for r in ranks]
        )

    def tensor_of(self, ranks: Sequence[int], stage: Stage, name: str) -> Tensor:
        """One tensor of some ranks, row after row in their order."""
        return cat_rows([self.stage(stage, rank)[name] for rank in ranks])

    def scale_of(self, ranks: Sequence[int], stage: Stage, name: str) -> Tensor | None:
        """``tensor_of`` the scales that belong to a tensor, or None where it has none."""
        scale = f"{name}_scale"
        return self.tensor_of(ranks, stage, scale) if scale in self.stage(stage, ranks[0]) else None

    @cached_property
    def layer_rows(self) -> Rows:
        """Every rank's layer rows, ranks ascending."""
        return self.rows_of(self.ranks)

    @cached_property
    def own_rows(self) -> Rows:
        """Every rank's own rows, ranks ascending."""
        return self.own_rows_of(self.ranks)

    @cached_property
    def layer_starts(self) -> list[int]:
        """Place of each rank's first row among ``layer_rows``."""
        starts, total = [], 0
        for tokens in self.layer_tokens:
            starts.append(total)
            total += len(tokens)
        return starts

    def layer_tensor(self, stage: Stage, name: str) -> Tensor:
        """One tensor of every rank's layer rows, as ``layer_rows``."""
        return self.tensor_of(self.ranks, stage, name)

    def dispatched_rows(self, ranks: Sequence[int]) -> Tensor:
        """[their layer rows, expert width] bf16 due in dispatch: traced rows, zeros behind."""
        rows = self.tensor_of(ranks, Stage.GLUE_IN, "hidden_states")
        missing = self.layer.expert_hidden_size - rows.shape[1]
        return torch.nn.functional.pad(rows, (0, missing)) if missing else rows

    @cached_property
    def is_masked(self) -> Tensor:
        """[all layer rows] bool: padding that the plan leaves unrouted."""
        padding = self.layer_rows.token == PADDING
        return padding if self.layer.sync.masks_padding else torch.zeros_like(padding)

    def first_rows(self, is_row: Tensor, rows: Rows) -> Tensor:
        """[T] for each global token, its first place among ``rows`` where ``is_row``, or -1."""
        found = torch.full((self.hidden_states.shape[0],), -1)
        places = (is_row & (rows.token != PADDING)).nonzero()[:, 0].flip(0)
        found[rows.token[places]] = places
        return found

    def of_tokens(self, stage: Stage, name: str) -> Tensor:
        """[T, ...] one tensor in global token order, from the first rank that holds each token."""
        return self.layer_tensor(stage, name)[self._first_places(stage)]

    def ranks_of_tokens(self, stage: Stage) -> Tensor:
        """[T] int64, the ranks that ``of_tokens`` takes its rows from."""
        return self._rows_of_tokens(stage).rank[self._first_places(stage)]

    def _first_places(self, stage: Stage) -> Tensor:
        rows = self._rows_of_tokens(stage)
        return self.first_rows(torch.ones_like(rows.token, dtype=torch.bool), rows)

    def _rows_of_tokens(self, stage: Stage) -> Rows:
        return self.own_rows if stage is Stage.GLUE_OUT else self.layer_rows

    # Rows a rank received, and the routes it computes.

    @cached_property
    def received_from(self) -> list[Tensor]:
        """For each rank [R], the place among ``layer_rows`` that every received row comes from.

        -1 for a row that holds none.
        """
        return [self.view.received_from(self, rank) for rank in self.ranks]

    def received_rows(self, rank: int) -> Rows:
        """Coordinates of what a rank received: its own rank, the rows' tokens."""
        source = self.received_from[rank]
        tokens = torch.full_like(source, PADDING)
        tokens[source >= 0] = self.layer_rows.token[source[source >= 0]]
        return Rows.of_rank(rank, len(tokens), tokens)

    @cached_property
    def routes(self) -> list[RankRoutes]:
        """For each rank, the routes that its received rows call for."""
        return [self.view.routes(self, rank) for rank in self.ranks]

    @cached_property
    def placed(self) -> list[RankRoutes]:
        """``routes`` without those whose grouped row does not exist."""
        return [self._only_placed(rank) for rank in self.ranks]

    @cached_property
    def computed(self) -> list[RankRoutes]:
        """``placed``; or, where the trace knows no routes, all rows that experts work on.

        Those belong to no known token.
        """
        try:
            return self.placed
        except NotCapturedError:
            return [self._unmapped(rank) for rank in self.ranks]

    def _unmapped(self, rank: int) -> RankRoutes:
        local, traced = self.slot_of_row[rank], self.stage(Stage.PRE_PERMUTE, rank)
        held = (local >= 0) & (local < self.layer.slots_per_rank)
        if "rows.live_rows" in traced:  # padding of a segment may carry its expert's id
            held &= torch.isin(torch.arange(len(local)), traced["rows.live_rows"])
        row = held.nonzero()[:, 0]
        experts = torch.tensor(self.layer.local_experts(rank))[local[row]]
        return RankRoutes(
            received=torch.full_like(row, -1),
            row=row,
            local=local[row],
            rows=replace(Rows.of_rank(rank, len(row)), expert=experts),
        )

    def _only_placed(self, rank: int) -> RankRoutes:
        routes = self.routes[rank]
        num_rows = len(self.slot_of_row[rank])
        exists = (routes.row >= 0) & (routes.row < num_rows)
        return RankRoutes(
            received=routes.received[exists],
            row=routes.row[exists],
            local=routes.local[exists],
            rows=routes.rows[exists],
        )

    # Grouped rows: expert segments end to end, or slabs laid end to end.

    @property
    def is_in_slabs(self) -> bool:
        """Whether grouped rows lie in one slab an expert."""
        return self.layer.gemm_layout is GemmLayout.MASKED

    def grouped(self, stage: Stage, rank: int, name: str) -> Tensor:
        """[M, C] grouped rows of a stage, slabs laid end to end."""
        tensor = self.stage(stage, rank)[name]
        return tensor.flatten(0, 1) if tensor.dim() == 3 else tensor

    @cached_property
    def slot_of_row(self) -> list[Tensor]:
        """For each rank [M], the local expert slot a grouped row is multiplied with; -1 = none."""
        return [self._slot_of_row(rank) for rank in self.ranks]

    def _slot_of_row(self, rank: int) -> Tensor:
        traced = self.stage(Stage.PRE_PERMUTE, rank)
        if not self.is_in_slabs:
            rows = min(len(traced["rows.m_indices"]), self._grouped_shape(rank)[0])
            return traced["rows.m_indices"][:rows].to(torch.int64)
        slabs, height = self._grouped_shape(rank)[:2]
        slot = torch.arange(slabs)[:, None].expand(slabs, height)
        is_real = torch.arange(height) < traced["rows.masked_m"][:, None]
        return slot.masked_fill(~is_real, -1).flatten()

    def _grouped_shape(self, rank: int) -> torch.Size:
        """Of grouped rows, wherever they were captured."""
        for stage, name in ((Stage.GEMM1, "gate_up"), (Stage.ACTIVATION, "hidden_states")):
            if "rows.hidden_states" not in self.stage(Stage.PRE_PERMUTE, rank) and (
                name in self.stage(stage, rank)
            ):
                return self.stage(stage, rank)[name].shape
        return self.stage(Stage.PRE_PERMUTE, rank)["rows.hidden_states"].shape

    @cached_property
    def all_routes(self) -> RouteValues:
        """Rows of the computed routes of every rank."""
        return RouteValues(self, self.ranks, keeps=True)

    @cached_property
    def route_parts(self) -> list[RouteValues]:
        """``all_routes`` in parts that can be compared one after the other."""
        return in_parts(self)

    def route_tensor(self, stage: Stage, name: str) -> Tensor:
        """[N, ...] rows of every rank's computed routes, ranks ascending."""
        return self.all_routes.tensor(stage, name)

    def route_scale(self, stage: Stage, name: str) -> Tensor | None:
        """``route_tensor``, or None where the recipe has no such scale."""
        return self.all_routes.scale(stage, name)

    def route_values(self, stage: Stage, name: str) -> Tensor:
        """[N, C] float64 of ``route_tensor``, codes times their scales."""
        return self.all_routes.values(stage, name)

    @property
    def route_rows(self) -> Rows:
        """Coordinates of every rank's computed routes, ranks ascending."""
        return self.all_routes.rows

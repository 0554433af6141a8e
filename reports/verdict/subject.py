"""What is judged: the facts of the layer, and its traces mapped to canonical coordinates."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe.arithmetic import ArithmeticModel
from moe.formats import QuantRecipe, ScaleFormat, Stage
from moe.trace import RankTrace, StageTensors
from moe.weights import WeightSource
from reports.verdict.decode import dequantized


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedLayer:
    """What a verdict needs to know about a layer, as plain values.

    tokens         rows each rank owns
    expert_rank    rank that computes each logical expert
    local_experts  logical experts of each rank, in slot order
    groups         EP group of each rank
    collectives    (stage, verb) of every collective of a forward, on the EP group, in order
    arithmetic     what the GEMM backend declares
    """

    tokens: tuple[int, ...]
    hidden_size: int
    top_k: int
    renormalize: bool
    routed_scaling_factor: float
    swiglu_limit: float | None
    recipe: QuantRecipe
    scale_format: ScaleFormat
    row_alignment: int
    expert_rank: tuple[int, ...]
    local_experts: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    collectives: tuple[tuple[Stage, str], ...]
    arithmetic: ArithmeticModel
    weights: WeightSource

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.tokens)

    @property
    def num_experts(self) -> int:
        """Logical experts of the model."""
        return len(self.expert_rank)

    def token_offset(self, rank: int) -> int:
        """Global number of a rank's first token."""
        return sum(self.tokens[:rank])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows:
    """Canonical coordinates of N rows; -1 where an axis does not apply.

    rank, token, slot, expert  [N] int64
    """

    rank: Tensor
    token: Tensor
    slot: Tensor
    expert: Tensor

    @staticmethod
    def of_rank(rank: int, num_rows: int, token: Tensor | None = None) -> "Rows":
        """Rows of one rank, with their global tokens where they have any."""
        none = torch.full((num_rows,), -1)
        return Rows(
            rank=torch.full((num_rows,), rank),
            token=none if token is None else token,
            slot=none,
            expert=none,
        )

    @staticmethod
    def cat(parts: Sequence["Rows"]) -> "Rows":
        """All rows of several parts."""
        return Rows(
            rank=torch.cat([part.rank for part in parts]),
            token=torch.cat([part.token for part in parts]),
            slot=torch.cat([part.slot for part in parts]),
            expert=torch.cat([part.expert for part in parts]),
        )

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(
            rank=self.rank[index],
            token=self.token[index],
            slot=self.slot[index],
            expert=self.expert[index],
        )

    def __len__(self) -> int:
        return self.rank.shape[0]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankRoutes:
    """The routes one rank computes: N of them.

    received  [N] int64  row among the received tokens
    row       [N] int64  grouped row that the trace says holds it; -1 or too large = nowhere
    local     [N] int64  local expert
    rows      canonical coordinates
    """

    received: Tensor
    row: Tensor
    local: Tensor
    rows: Rows


class Subject:
    """The traces of all ranks of one forward, with their rows mapped.

    Args:
        layer: facts of the layer.
        hidden_states: [T, H] bf16 global token list that went in.
        traces: one a rank, in rank order.
    """

    def __init__(
        self, layer: JudgedLayer, hidden_states: Tensor, traces: Sequence[RankTrace]
    ) -> None:
        self.layer = layer
        self.hidden_states = hidden_states
        self.traces = traces
        self._values: dict[tuple[Stage, str], Tensor] = {}

    def stage(self, stage: Stage, rank: int) -> StageTensors:
        """Named tensors of a stage on a rank."""
        return self.traces[rank][stage]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.layer.world_size)

    def own_tokens(self, rank: int) -> Tensor:
        """[T_r] global numbers of the tokens a rank owns."""
        first = self.layer.token_offset(rank)
        return torch.arange(first, first + self.layer.tokens[rank])

    def rows_of(self, ranks: Sequence[int]) -> Rows:
        """Own tokens of some ranks, in their order."""
        return Rows.cat([Rows.of_rank(r, self.layer.tokens[r], self.own_tokens(r)) for r in ranks])

    def tensor_of(self, ranks: Sequence[int], stage: Stage, name: str) -> Tensor:
        """One tensor of some ranks' own tokens, row by row in their order."""
        return cat_rows([self.stage(stage, rank)[name] for rank in ranks])

    @cached_property
    def token_rows(self) -> Rows:
        """Every rank's own tokens, ranks ascending: [T]."""
        return self.rows_of(self.ranks)

    def token_tensor(self, stage: Stage, name: str) -> Tensor:
        """[T, ...] one tensor of every rank's own tokens, in global token order."""
        return self.tensor_of(self.ranks, stage, name)

    def routed_ids(self, rank: int) -> Tensor:
        """[T_r, K] int64 experts of a rank's own tokens; -1 for an id that names none."""
        ids = self.stage(Stage.ROUTE, rank)["topk_ids"].to(torch.int64)
        return ids.masked_fill((ids < 0) | (ids >= self.layer.num_experts), -1)

    @cached_property
    def received_tokens(self) -> list[Tensor]:
        """For each rank [R], the global token of every received row."""
        offsets = torch.tensor([self.layer.token_offset(rank) for rank in self.ranks])
        return [
            offsets[self.stage(Stage.DISPATCH, rank)["handle.source_rank"]]
            + self.stage(Stage.DISPATCH, rank)["handle.source_row"]
            for rank in self.ranks
        ]

    @cached_property
    def routes(self) -> list[RankRoutes]:
        """For each rank, the routes its received ids name; ids outside its experts are none."""
        return [self._routes_of(rank) for rank in self.ranks]

    def _routes_of(self, rank: int) -> RankRoutes:
        ids = self.stage(Stage.DISPATCH, rank)["topk_ids"]
        experts = torch.tensor(self.layer.local_experts[rank])
        received, slot = ((ids >= 0) & (ids < len(experts))).nonzero(as_tuple=True)
        local = ids[received, slot]
        return RankRoutes(
            received=received,
            row=self.stage(Stage.PRE_PERMUTE, rank)["restore.output_index"][received, slot],
            local=local,
            rows=Rows(
                rank=torch.full_like(received, rank),
                token=self.received_tokens[rank][received],
                slot=slot,
                expert=experts[local],
            ),
        )

    @cached_property
    def placed(self) -> list[RankRoutes]:
        """``routes`` without those whose grouped row does not exist."""
        return [self._only_placed(rank) for rank in self.ranks]

    def _only_placed(self, rank: int) -> RankRoutes:
        routes = self.routes[rank]
        grouped = self.stage(Stage.PRE_PERMUTE, rank)
        num_rows = min(len(grouped["rows.m_indices"]), len(grouped["rows.hidden_states"]))
        exists = (routes.row >= 0) & (routes.row < num_rows)
        return RankRoutes(
            received=routes.received[exists],
            row=routes.row[exists],
            local=routes.local[exists],
            rows=routes.rows[exists],
        )

    def route_tensor(self, stage: Stage, name: str) -> Tensor:
        """[N, ...] rows of every rank's placed routes, ranks ascending."""
        return cat_rows(
            [take_rows(self.stage(stage, r)[name], self.placed[r].row) for r in self.ranks]
        )

    def route_scale(self, stage: Stage, name: str) -> Tensor | None:
        """``route_tensor``, or None where the recipe has no such scale."""
        return self.route_tensor(stage, name) if name in self.stage(stage, 0) else None

    def route_values(self, stage: Stage, name: str) -> Tensor:
        """[N, C] float64 of ``route_tensor``, codes times their scales; kept."""
        if (stage, name) not in self._values:
            scale = self.route_scale(stage, f"{name}_scale")
            self._values[stage, name] = dequantized(self.route_tensor(stage, name), scale)
        return self._values[stage, name]

    @cached_property
    def route_rows(self) -> Rows:
        """Coordinates of every rank's placed routes, ranks ascending."""
        return Rows.cat([placed.rows for placed in self.placed])

    def slots_with_rows(self) -> Iterator[tuple[int, int, Tensor]]:
        """(rank, local expert, positions in ``route_rows``) of every slot that has routes.

        The expert is the one that ``m_indices`` gives the route's row to, right or wrong: a GEMM
        answers for its arithmetic, not for its input. Rows of no local expert are left out.
        """
        start = 0
        for rank in self.ranks:
            rows, held = self.placed[rank].row, len(self.layer.local_experts[rank])
            local = self.stage(Stage.PRE_PERMUTE, rank)["rows.m_indices"][rows]
            for expert in distinct(local[(local >= 0) & (local < held)]):
                yield rank, expert, start + (local == expert).nonzero()[:, 0]
            start += len(rows)


def distinct(values: Tensor) -> list[int]:
    """The different entries of a non-negative integer tensor, ascending."""
    found: list[int] = torch.bincount(values).nonzero()[:, 0].tolist()
    return found


def take_rows(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]`` for any dtype; float8 has no indexing of its own."""
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        return tensor.view(torch.uint8).index_select(0, index).view(tensor.dtype)
    return tensor.index_select(0, index)


def cat_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors, row-major; float8 travels as bytes, mixed dtypes become float64."""
    dtype = tensors[0].dtype
    if any(tensor.dtype != dtype for tensor in tensors):
        return torch.cat([tensor.to(torch.float64) for tensor in tensors])
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)
    return torch.cat(list(tensors))

"""Inherited errors: the run against the golden of the same recipe, and that one against ideal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moe.formats import SharedExpertMode, Stage
from moe.golden import GoldenTrace
from reports.verdict.captured import NotCapturedError
from reports.verdict.layer import Shard
from reports.verdict.rows import Rows, distinct
from reports.verdict.subject import Subject
from topology.sync import PADDING, Reducer


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Relative Frobenius distances of one stage's values, over all ranks; never merged.

    same_recipe_to_ideal  what the recipe itself costs
    run_to_same_recipe    what the run differs from its recipe
    """

    same_recipe_to_ideal: float
    run_to_same_recipe: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EndToEnd:
    """Inherited errors of one forward.

    worst_row  (stage, rank) -> worst relative error of a row against the same-recipe golden
    distances  stage -> both distances
    """

    worst_row: Mapping[tuple[Stage, int], float]
    distances: Mapping[Stage, Distance]


def measure(subject: Subject, same_recipe: GoldenTrace, ideal: GoldenTrace) -> EndToEnd:
    """Compare every captured stage that has canonical values with both goldens."""
    worst: dict[tuple[Stage, int], float] = {}
    distances: dict[Stage, Distance] = {}
    for stage, name, shards, parts in _stages(subject):
        sums = _Sums()
        try:
            for rows, got in parts():
                want, exact = (_at(golden, name, rows, shards) for golden in (same_recipe, ideal))
                sums.add(rows, got, want, exact)
        except NotCapturedError:
            continue
        if sums.worst:
            worst |= {(stage, rank): ratio for rank, ratio in sums.worst.items()}
            distances[stage] = sums.distance()
    return EndToEnd(worst_row=worst, distances=distances)


@dataclass(slots=True)
class _Sums:
    """Of one stage, over parts of its rows.

    squares  [4] float64: of the run's error, the recipe's error, same_recipe, ideal
    worst    rank -> worst relative error of a row
    """

    squares: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    worst: dict[int, float] = field(default_factory=dict)

    def add(self, rows: Rows, got: Tensor, want: Tensor, exact: Tensor) -> None:
        """Take in some rows, [N, C] float64 each."""
        error, size = (got - want).norm(dim=1), want.norm(dim=1)
        by_row = _ratio(error, size)
        for rank in distinct(rows.rank):
            self.worst[rank] = float(by_row[rows.rank == rank].max())
        norms = torch.stack([error.norm(), (want - exact).norm(), size.norm(), exact.norm()])
        self.squares += norms.square()

    def distance(self) -> Distance:
        """Both distances over all rows."""
        error, of_recipe, same_recipe, ideal = self.squares.sqrt()
        return Distance(
            same_recipe_to_ideal=float(_ratio(of_recipe, ideal)),
            run_to_same_recipe=float(_ratio(error, same_recipe)),
        )


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """Error over size; 0 where there is none, infinite where it is no number."""
    ratio = torch.where(error == 0, 0.0, error / size)
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)


_Parts = Callable[[], Iterator[tuple[Rows, Tensor]]]


def _stages(subject: Subject) -> Iterator[tuple[Stage, str, Sequence[Shard], _Parts]]:
    """(stage, name in the golden's trace, shard of each rank, how to read rows and values).

    Only where there are rows of tokens, and sums that are complete: a shard's or a rank's partial
    has no counterpart in the golden's trace.
    """
    layer = subject.layer
    whole = [Shard(index=0, count=1)] * layer.world_size
    shards = [layer.expert_shard(rank) for rank in subject.ranks]
    for stage, name, golden, cut in (
        (Stage.PRE_PERMUTE, "rows.hidden_states", "dispatched", whole),
        (Stage.GEMM1, "gate_up", "gate_up", shards),
        (Stage.ACTIVATION, "hidden_states", "activation", shards),
        (Stage.GEMM2, "output", "expert_output", whole if layer.layout.moe_tp == 1 else None),
    ):
        if cut is not None:
            yield stage, golden, cut, partial(_of_routes, subject, stage, name)
    complete = layer.is_all_to_all
    adds_later = layer.shared is SharedExpertMode.LOCAL
    finished = layer.sync.reducer is not Reducer.GLUE_OUT and not adds_later
    for stage, name, golden, comparable in (
        (Stage.ROUTE, "logits", "logits", True),
        (Stage.COMBINE, "routed", "routed", complete),
        (Stage.TAIL, "output", "output", finished),
        (Stage.GLUE_OUT, "hidden_states", "output", True),
    ):
        if comparable:
            yield stage, golden, whole, partial(_of_tokens, subject, stage, name)


def _of_routes(subject: Subject, stage: Stage, name: str) -> Iterator[tuple[Rows, Tensor]]:
    """Rows of tokens' routes, and their values [N, C] float64; none where routes are unknown."""
    for part in subject.route_parts:
        real = (part.rows.token != PADDING) & (part.rows.slot >= 0)
        if bool(real.any()):
            rows, values = part.rows, part.values(stage, name)
            yield (rows, values) if bool(real.all()) else (rows[real], values[real])


def _of_tokens(subject: Subject, stage: Stage, name: str) -> Iterator[tuple[Rows, Tensor]]:
    """Rows of tokens, and their values [N, C] float64."""
    rows = subject.own_rows if stage is Stage.GLUE_OUT else subject.layer_rows
    real = rows.token != PADDING
    if bool(real.any()):
        yield rows[real], subject.tensor_of(subject.ranks, stage, name).double()[real]


def _at(golden: GoldenTrace, name: str, rows: Rows, shards: Sequence[Shard]) -> Tensor:
    """[N, C] float64 of the golden at canonical coordinates: token or route, shard of columns."""
    values: Tensor = getattr(golden, name)
    if values.dim() == 2:
        return values.index_select(0, rows.token)
    places = rows.token * values.shape[1] + rows.slot
    flat = values.flatten(0, 1).index_select(0, places).to(torch.float64)
    if shards[0].count == 1:
        return flat
    halves = 2 if name == "gate_up" else 1
    cut = torch.unflatten(flat, 1, (halves, shards[0].count, -1))
    index = torch.tensor([shard.index for shard in shards])[rows.rank]
    return cut[torch.arange(len(flat)), :, index].flatten(1)

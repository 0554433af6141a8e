"""Inherited errors: the run against the golden of the same recipe, and that one against ideal."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.formats import Stage
from moe.golden import GoldenTrace
from reports.verdict.subject import Rows, Subject, distinct


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
    """Compare every stage that has canonical values with both goldens."""
    worst: dict[tuple[Stage, int], float] = {}
    distances: dict[Stage, Distance] = {}
    for stage, rows, got, name in _stage_values(subject):
        want, exact = _at(same_recipe, name, rows), _at(ideal, name, rows)
        error, size = (got - want).norm(dim=1), want.norm(dim=1)
        by_row = _ratio(error, size)
        for rank in distinct(rows.rank):
            worst[stage, rank] = float(by_row[rows.rank == rank].max())
        distances[stage] = Distance(
            same_recipe_to_ideal=float(_ratio((want - exact).norm(), exact.norm())),
            run_to_same_recipe=float(_ratio(error.norm(), size.norm())),
        )
    return EndToEnd(worst_row=worst, distances=distances)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """Error over size; 0 where there is none, infinite where it is no number."""
    ratio = torch.where(error == 0, 0.0, error / size)
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)


def _stage_values(subject: Subject) -> Iterator[tuple[Stage, Rows, Tensor, str]]:
    """(stage, rows, [N, C] float64 values, name in the golden's trace) where there are rows."""
    tokens, routes = subject.token_rows, subject.route_rows
    if len(tokens):
        yield Stage.ROUTE, tokens, subject.token_tensor(Stage.ROUTE, "logits").double(), "logits"
    if len(routes):
        for stage, name, golden in (
            (Stage.PRE_PERMUTE, "rows.hidden_states", "dispatched"),
            (Stage.GEMM1, "gate_up", "gate_up"),
            (Stage.ACTIVATION, "hidden_states", "activation"),
            (Stage.GEMM2, "output", "expert_output"),
        ):
            yield stage, routes, subject.route_values(stage, name), golden
    if len(tokens):
        for stage, name, golden in (
            (Stage.COMBINE, "routed", "routed"),
            (Stage.TAIL, "output", "output"),
            (Stage.GLUE_OUT, "hidden_states", "output"),
        ):
            yield stage, tokens, subject.token_tensor(stage, name).double(), golden


def _at(golden: GoldenTrace, name: str, rows: Rows) -> Tensor:
    """The golden's values at canonical coordinates: by token, or by token and slot."""
    values: Tensor = getattr(golden, name)
    if values.dim() == 2:
        return values.index_select(0, rows.token)
    return values.flatten(0, 1).index_select(0, rows.token * values.shape[1] + rows.slot)

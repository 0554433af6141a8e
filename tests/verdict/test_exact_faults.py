"""Local faults at many places: exact mode sees them all, down to half a bf16 place."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from moe.formats import Stage
from moe.trace import RankTrace
from tests.verdict.clean_runs import CleanRun
from tests.verdict.exact_runs import compared, exact_run

RUNS = ("ue8m0", "fp32")
PLACES = 6

Spoil = Callable[[Tensor, int], Tensor]


def traced(run: CleanRun, stage: Stage, tensor: str, change: Spoil, at: int) -> Sequence[RankTrace]:
    right = run.tensor(stage, 0, tensor)
    return run.changed(stage, 0, {tensor: change(right.clone(), at % len(right))})


def dropped(rows: Tensor, at: int) -> Tensor:
    rows[at] = 0
    return rows


def doubled(rows: Tensor, at: int) -> Tensor:
    rows[at] *= 2
    return rows


def swapped(rows: Tensor, at: int) -> Tensor:
    rows[[at, at - 1]] = rows[[at - 1, at]]
    return rows


def lost_columns(rows: Tensor, at: int) -> Tensor:
    rows[at, :128] = 0
    return rows


def gained(share: float) -> Spoil:
    def gain(rows: Tensor, at: int) -> Tensor:
        rows[at] = (rows[at].float() * (1 + share)).to(rows.dtype)
        return rows

    return gain


FAULTS = {
    "dropped": dropped,
    "doubled": doubled,
    "swapped": swapped,
    "128 columns lost": lost_columns,
    "4 % too large": gained(0.04),
    "1 % too large": gained(0.01),
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_partial_that_is_wrong_for_one_token_is_seen_everywhere(name, fault):
    run = exact_run(name)
    for at in range(PLACES):
        traces = traced(run, Stage.POST_PERMUTE, "partial", FAULTS[fault], at)
        (one,) = compared(name, traces)
        assert (one.stage, one.rank, one.rows <= 2) == (Stage.POST_PERMUTE, 0, True)


@pytest.mark.parametrize("name", RUNS)
def test_a_gain_under_half_a_place_vanishes_at_the_store(name):
    """The blind zone, stated with every agree: 0.1 % of a bf16 value is stored as that value."""
    run = exact_run(name)
    assert compared(name, traced(run, Stage.POST_PERMUTE, "partial", gained(0.001), 1)) == []


@pytest.mark.parametrize("name", RUNS)
def test_weights_in_the_wrong_slots_are_seen(name):
    run = exact_run(name)
    seen = [
        compared(name, traced(run, Stage.ROUTE, "topk_weights", rolled_slots, at))
        for at in range(PLACES)
    ]
    assert all(one[0].stage is Stage.ROUTE for one in seen)


def rolled_slots(weights: Tensor, at: int) -> Tensor:
    unequal = weights != weights.roll(1, 1)
    assert bool(unequal.any(1).all())
    weights[at] = weights[at].roll(1)
    return weights


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize(
    ("stage", "tensor"),
    [
        (Stage.DISPATCH, "hidden_states_scale"),
        (Stage.PRE_PERMUTE, "rows.hidden_states_scale"),
        (Stage.ACTIVATION, "hidden_states_scale"),
    ],
    ids=str,
)
def test_scales_of_another_row_or_exponent_are_seen(name, stage, tensor):
    run, route = exact_run(name), exact_run(name).route(0)
    row = route.received if stage is Stage.DISPATCH else route.row
    right = run.tensor(stage, 0, tensor)
    for shift in (1, 2):
        wrong = torch.empty_strided(right.shape, right.stride(), dtype=right.dtype).copy_(right)
        if right.dtype == torch.float32:
            wrong[row] *= 2.0**shift
        else:
            wrong[row] += shift  # the exponent of the first group
        found = compared(name, run.changed(stage, 0, {tensor: wrong}))
        assert {(one.stage, one.rank) for one in found} == {(stage, 0)}

"""Inherited errors: every row and column meets its own counterpart in the golden."""

import pytest
import torch

from moe.formats import Stage
from tests.verdict.layouts import LAYOUTS

EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
COMPARED = {Stage.PRE_PERMUTE, Stage.GEMM1, Stage.ACTIVATION, Stage.ROUTE, Stage.GLUE_OUT}


@pytest.fixture
def judgement(clean_layout, layout):
    run = clean_layout(layout)
    return run.judge.judge(run.batch, run.traces, run.calls)


@EVERY_LAYOUT
def test_a_clean_run_is_as_good_as_its_recipe_in_every_row(judgement):
    """A row, a shard or a rank mixed up would differ by more than its own size."""
    assert max(judgement.end_to_end.worst_row.values()) < 2.0**-8


@EVERY_LAYOUT
def test_the_recipes_own_error_is_not_counted_as_the_runs(judgement):
    distance = judgement.end_to_end.distances[Stage.GLUE_OUT]
    assert 0 <= distance.run_to_same_recipe < distance.same_recipe_to_ideal / 8


@EVERY_LAYOUT
def test_stages_with_complete_sums_are_compared_and_partial_ones_are_not(
    judgement, clean_layout, layout
):
    judged = clean_layout(layout).resolved.judged
    expected = set(COMPARED)
    expected |= {Stage.GEMM2} if judged.layout.moe_tp == 1 else set()
    expected |= {Stage.COMBINE} if layout == "tp_ep_all_to_all" else set()
    expected |= {Stage.TAIL} if judged.sync.reducer in ("tail", "combine") else set()
    assert set(judgement.end_to_end.distances) == expected


@pytest.mark.parametrize("layout", ["pure_tp", "cp_gather"])
def test_a_row_off_by_a_tenth_shows_as_a_tenth_on_its_rank(clean_layout, layout):
    run = clean_layout(layout)
    rank = run.last_rank
    row = next(i for i in range(9) if run.own_token(rank, i) >= 0)
    rows = run.tensor(Stage.GLUE_OUT, rank, "hidden_states").double()
    rows[row] *= 1.1
    traces = run.changed(Stage.GLUE_OUT, rank, {"hidden_states": rows})
    worst = run.judge.judge(run.batch, traces, run.calls).end_to_end.worst_row
    assert worst[Stage.GLUE_OUT, rank] == pytest.approx(0.1, rel=0.02)
    assert worst[Stage.GLUE_OUT, 0] < 2.0**-8


@EVERY_LAYOUT
def test_output_and_routes_are_handed_over_in_global_token_order(judgement, clean_layout, layout):
    run = clean_layout(layout)
    for rank, tokens in enumerate(run.resolved.judged.sync.entry):
        rows = run.tensor(Stage.GLUE_OUT, rank, "hidden_states")
        for row, token in enumerate(tokens):
            if token >= 0:
                assert torch.equal(judgement.output[token], rows[row])

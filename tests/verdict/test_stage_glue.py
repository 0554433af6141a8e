"""The glue: one spoiled tensor of glue_in or glue_out is found there and named."""

import pytest
import torch

from moe.formats import Stage


@pytest.mark.parametrize("stage", [Stage.GLUE_IN, Stage.GLUE_OUT])
def test_one_bit_changed_by_the_glue_is_a_broken_move(clean, last_places, stage):
    rank = clean.last_rank
    rows = last_places(clean.tensor(stage, rank, "hidden_states"), 2, 5, 1)
    first = clean.first(stage, rank, "hidden_states", rows)
    assert (first.check, first.stage, first.rank) == ("contract: moves", stage, rank)
    assert first.token == clean.own_token(rank, 2)


def test_rows_of_another_dtype_are_a_broken_move_even_with_equal_values(clean):
    rows = clean.tensor(Stage.GLUE_OUT, 0, "hidden_states")
    traces = clean.changed(Stage.GLUE_OUT, 0, {"hidden_states": rows.to(torch.float32)})
    deviations = clean.judged(traces).deviations
    assert {(d.stage, d.tensor) for d in deviations} == {(Stage.GLUE_OUT, "hidden_states")}
    assert "contract: moves" in {d.check for d in deviations}

"""Goldens of blocks of tokens are the goldens of all tokens."""

import pytest
import torch

from reports.verdict import goldens


def judged(run):
    """Both goldens' tokens and what was measured of their routes."""
    calls = run.calls
    return run.judge.judge(run.batch, run.traces, calls)


@pytest.mark.parametrize("block_bytes", [1, 100_000], ids=["token by token", "some tokens"])
def test_blocks_change_no_value_of_a_golden(clean_ue8m0, monkeypatch, block_bytes):
    whole = judged(clean_ue8m0)
    monkeypatch.setattr(goldens, "BLOCK_BYTES", block_bytes)
    parts = judged(clean_ue8m0)
    assert torch.equal(parts.same_recipe.output, whole.same_recipe.output)
    assert torch.allclose(parts.ideal.output, whole.ideal.output, rtol=1e-12)
    assert parts.end_to_end.worst_row == whole.end_to_end.worst_row
    for stage, of_all in whole.end_to_end.distances.items():
        found = parts.end_to_end.distances[stage]
        assert found.same_recipe_to_ideal == pytest.approx(of_all.same_recipe_to_ideal, rel=1e-6)


def test_as_many_tokens_are_computed_at_a_time_as_there_is_room_for(clean_ue8m0, monkeypatch):
    layer, seen = clean_ue8m0.resolved.judged, []
    a_token = 8 * layer.top_k * (3 * layer.intermediate_size + layer.expert_hidden_size)
    forward = goldens.golden_forward
    monkeypatch.setattr(goldens, "BLOCK_BYTES", 7 * a_token)
    monkeypatch.setattr(
        goldens,
        "golden_forward",
        lambda model, weights, rows, **pins: (
            seen.append(len(rows)) or forward(model, weights, rows, **pins)
        ),
    )
    judged(clean_ue8m0)
    assert seen == [7, 7, 3] * 2

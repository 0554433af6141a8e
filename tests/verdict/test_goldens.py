"""Goldens of a batch: which bytes their rows of routes are kept in."""

import pytest
import torch

from moe.golden import golden_forward
from reports.verdict.golden_model import golden_model
from reports.verdict.goldens import golden_of
from reports.verdict.weights import expert_sizes, ideal_weights

OF_ROUTES = ("gate_up", "activation", "expert_output")


def goldens(run, *, rounding):
    """(as it is kept, all of it in float64)"""
    layer, hidden_states = run.resolved.judged, run.batch.hidden_states
    weights = ideal_weights(layer.weights, expert_sizes(layer))
    kept = golden_of(layer, run.batch, weights, rounding=rounding)
    return kept, golden_forward(golden_model(layer), weights, hidden_states, rounding=rounding)


@pytest.mark.parametrize("name", OF_ROUTES)
def test_a_golden_with_rounding_keeps_its_routes_in_bf16_and_loses_nothing(clean_ue8m0, name):
    kept, whole = (getattr(golden, name) for golden in goldens(clean_ue8m0, rounding=True))
    assert (kept.dtype, whole.dtype) == (torch.bfloat16, torch.float64)
    assert torch.equal(kept.double(), whole)


@pytest.mark.parametrize("name", OF_ROUTES)
def test_an_ideal_golden_keeps_its_routes_in_fp32(clean_ue8m0, name):
    kept, whole = (getattr(golden, name) for golden in goldens(clean_ue8m0, rounding=False))
    assert torch.equal(kept, whole.float())


def test_what_is_kept_of_routes_changes_no_output(clean_ue8m0):
    kept, whole = goldens(clean_ue8m0, rounding=False)
    assert torch.equal(kept.output, whole.output)

"""Weights without the rounding of their scales: kept if all of a layer's fit, or not at all."""

import pytest
import torch

from moe.formats import ScaleFormat
from reports.verdict import nominal_weights
from reports.verdict.nominal_weights import NominalWeights
from reports.verdict.weights import StreamedWeights

NUM_EXPERTS = 2
A_PAIR = 2 * (4 * 8 + 2 * 8 + 2 * 1)
"""Bytes of two nominal matrices of 2 x 2."""


def of_ones():
    ones = torch.ones(2, 2, dtype=torch.float64)
    gate = torch.zeros(NUM_EXPERTS, 2)
    return StreamedWeights(gate, None, None, 2, lambda _: (ones, ones), lambda: (ones, ones))


@pytest.mark.parametrize(
    ("room", "is_kept"),
    [(NUM_EXPERTS * A_PAIR, True), (NUM_EXPERTS * A_PAIR - 1, False)],
    ids=["all fit", "one does not"],
)
@pytest.mark.parametrize("read", [lambda weights: weights.expert(0), NominalWeights.shared])
def test_nominal_matrices_are_kept_if_all_fit(room, is_kept, read, monkeypatch):
    monkeypatch.setattr(nominal_weights, "CACHED_BYTES", room)
    weights = NominalWeights(of_ones(), of_ones(), ScaleFormat.UE8M0)
    assert (read(weights) is read(weights)) is is_kept

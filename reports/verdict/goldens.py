"""Golden forwards of a batch: rows of routes are many, and kept in fewer bytes."""

import torch
from torch import Tensor

from moe.batch import Batch
from moe.formats import Stage
from moe.golden import GoldenTrace, GoldenWeights, golden_forward
from reports.verdict.golden_model import golden_model
from reports.verdict.layer import JudgedLayer
from reports.verdict.narrow import narrowest
from reports.verdict.subject import Subject


def golden_of(
    layer: JudgedLayer,
    batch: Batch,
    weights: GoldenWeights,
    *,
    rounding: bool,
    **by_token: Tensor | None,
) -> GoldenTrace:
    """A golden forward of all tokens of a batch.

    Args:
        layer: facts of the layer.
        batch: the global token list.
        weights: as they are read, or the ideal ones.
        rounding: as of ``golden_forward``. With it, rows of routes are kept in the narrowest dtype
            that has them; without it in fp32, since distances alone are asked of them.
        **by_token: what is pinned, [T, K] each.
    """
    return golden_forward(
        golden_model(layer),
        weights,
        batch.hidden_states,
        rounding=rounding,
        input_ids=batch.input_ids,
        keep=narrowest if rounding else torch.Tensor.float,
        **by_token,
    )


def first_rows(subject: Subject) -> Tensor:
    """[T] the first routed row of each token."""
    return subject.first_rows(~subject.is_masked, subject.layer_rows)


def ep_ranks_of(subject: Subject) -> Tensor:
    """[T, K] EP rank that the run chose for each route."""
    layer, run = subject.layer, first_rows(subject)
    slots = subject.layer_tensor(Stage.DISPATCH, "physical_ids").to(torch.int64)[run]
    return slots.clamp(0, len(layer.slot_experts) - 1) // layer.slots_per_rank

"""Golden forwards of a batch, block by block: rows of routes are many, and kept in fewer bytes."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from moe.batch import Batch
from moe.formats import Stage
from moe.golden import GoldenTrace, GoldenWeights, golden_forward
from reports.verdict.golden_model import golden_model
from reports.verdict.layer import JudgedLayer
from reports.verdict.narrow import narrowest
from reports.verdict.subject import Subject

BLOCK_BYTES = 1 << 30
"""Of float64 rows of routes that a golden has at once; experts are read again for each block."""


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
    model, given = golden_model(layer), {"input_ids": batch.input_ids, **by_token}

    def of_tokens(block: slice) -> GoldenTrace:
        pins = {name: None if rows is None else rows[block] for name, rows in given.items()}
        tokens = batch.hidden_states[block]
        golden = golden_forward(model, weights, tokens, rounding=rounding, **pins)
        return _with_routes(golden, narrowest if rounding else torch.Tensor.float)

    a_token = 8 * layer.top_k * (3 * layer.intermediate_size + layer.expert_hidden_size)
    step, num_tokens = max(BLOCK_BYTES // a_token, 1), len(batch.hidden_states)
    blocks = [slice(start, start + step) for start in range(0, max(num_tokens, 1), step)]
    return _joined([of_tokens(block) for block in blocks])


def _with_routes(golden: GoldenTrace, kept: Callable[[Tensor], Tensor]) -> GoldenTrace:
    return replace(
        golden,
        gate_up=kept(golden.gate_up),
        activation=kept(golden.activation),
        expert_output=kept(golden.expert_output),
    )


def _joined(parts: Sequence[GoldenTrace]) -> GoldenTrace:
    """Of all tokens; bf16 beside fp32 becomes fp32."""
    if len(parts) == 1:
        return parts[0]
    whole: dict[str, Any] = {}
    for field in fields(GoldenTrace):
        rows = [getattr(part, field.name) for part in parts]
        whole[field.name] = None if rows[0] is None else torch.cat(rows)
    return GoldenTrace(**whole)


def first_rows(subject: Subject) -> Tensor:
    """[T] the first routed row of each token."""
    return subject.first_rows(~subject.is_masked, subject.layer_rows)


def ep_ranks_of(subject: Subject) -> Tensor:
    """[T, K] EP rank that the run chose for each route."""
    layer, run = subject.layer, first_rows(subject)
    slots = subject.layer_tensor(Stage.DISPATCH, "physical_ids").to(torch.int64)[run]
    return slots.clamp(0, len(layer.slot_experts) - 1) // layer.slots_per_rank

"""How large the terms are that make up an output cell: what roundings of them are held against."""

import torch
from torch import Tensor

from actors.result_rows import ModeRun
from moe.golden import golden_forward
from reports.verdict.golden_model import golden_model
from reports.verdict.layer import JudgedLayer
from reports.verdict.weights import GoldenPreparation, expert_sizes


def terms_of(layer: JudgedLayer, run: ModeRun) -> Tensor:
    """[T, H] sum of |terms| of each output cell, by the golden's expert rows."""
    golden = run.judgement.same_recipe
    prepared = GoldenPreparation(
        layer.weights, layer.recipe, layer.scale_format, expert_sizes(layer)
    )
    trace = golden_forward(
        golden_model(layer),
        prepared.weights(),
        run.batch.hidden_states,
        rounding=True,
        topk_ids=golden.topk_ids,
        topk_weights=golden.topk_weights,
    )
    routed = torch.einsum("tk,tkh->th", trace.topk_weights.abs(), trace.expert_output.abs())
    assert trace.shared is not None
    return 1.5 * routed + trace.shared.abs()

"""The golden MLP: where it stores the activation, by layout."""

import pytest
import torch

from moe.formats import GatedActivation, GemmLayout, QuantRecipe, ScaleFormat, ScoringFunc
from moe.golden import GoldenModel, GoldenRouting, GoldenTrace, RoundingPath, golden_forward


class OneColumnOf128:
    """128 columns, of which the first counts: gate and up as given, w2 the identity."""

    correction_bias = None
    intermediate_size = 128
    gate_weight = torch.zeros(1, 128, dtype=torch.float64)

    def __init__(self, gate: float, up: float):
        self.w13 = torch.zeros(256, 128, dtype=torch.float64)
        self.w13[0, 0], self.w13[128, 0] = gate, up

    def expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.w13, torch.eye(128, dtype=torch.float64)

    def shared(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.expert(0)


def forward(
    gate: float,
    up: float,
    limit: float | None,
    layout: GemmLayout,
    recipe: QuantRecipe = QuantRecipe.FP8_BLOCK128,
) -> GoldenTrace:
    """A token of 1 in the first column, by default with fp8 activations."""
    model = GoldenModel(
        routing=GoldenRouting(top_k=1, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=False),
        routed_scaling_factor=1.0,
        activation=GatedActivation(limit=limit),
        recipe=recipe,
        scale_format=ScaleFormat.NONE if recipe is QuantRecipe.BF16 else ScaleFormat.UE8M0,
        path=RoundingPath(folds_factor=True, layout=layout),
    )
    token = torch.zeros(1, 128)
    token[0, 0] = 1.0
    ids = torch.zeros(1, 1, dtype=torch.int64)
    return golden_forward(model, OneColumnOf128(gate, up), token, rounding=True, topk_ids=ids)


# 1.8125 lies midway between the codes of 1.75 and 1.875 and goes to 1.75. silu(gate) * up is
# 1.81499 (A) or 1.81375 (B), so 1.8125 in bf16. With silu stored first it is 1.8203125 (A) or
# 1.8125 (B).
A, B = (1.4375, 1.5625), (1.1953125, 1.9765625)


@pytest.mark.parametrize(
    ("pair", "limit", "layout", "expected"),
    [
        (A, None, GemmLayout.CONTIG, 1.75),
        (A, 10.0, GemmLayout.CONTIG, 1.75),
        (A, None, GemmLayout.MASKED, 1.875),
        (A, 10.0, GemmLayout.MASKED, 1.875),
        (B, None, GemmLayout.MASKED, 1.75),
        (B, 10.0, GemmLayout.MASKED, 1.875),
    ],
    ids=lambda value: str(value),
)
def test_the_masked_layout_stores_a_quantised_activation_elsewhere(pair, limit, layout, expected):
    assert forward(*pair, limit, layout).activation[0, 0, 0].item() == expected


@pytest.mark.parametrize("limit", [None, 10.0])
def test_the_shared_expert_rounds_as_in_the_contiguous_layout(limit):
    masked = forward(*A, limit, GemmLayout.MASKED)
    assert masked.shared[0, 0].item() == 1.75


@pytest.mark.parametrize("layout", list(GemmLayout))
@pytest.mark.parametrize("limit", [None, 10.0])
def test_bf16_activations_are_stored_once_in_either_layout(limit, layout):
    assert forward(*A, limit, layout, QuantRecipe.BF16).activation[0, 0, 0].item() == 1.8125

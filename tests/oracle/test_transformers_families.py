"""The golden router and layer against transformers' blocks of each family, in float64.

Read side by side (transformers 5.24), the blocks multiply the routed scaling factor into the
top-k weights (MiniMax M3's into their sum) and leave the order of slots and of ties open; both
vanish in what is compared here. gpt-oss runs with its biases at zero.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import GoldenModel, GoldenTrace, Routes, golden_forward
from moe.golden.routing import select_experts
from tests.oracle.blocks import (
    FAMILIES,
    VOCAB,
    BlockWeights,
    CastsToFloat64,
    E,
    Family,
    H,
    T,
    assert_equal_to_1e_12,
    drawn,
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One family's block and the golden of the same weights and tokens."""

    family: Family
    block: nn.Module
    tokens: torch.Tensor
    input_ids: torch.Tensor
    routes: Routes
    trace: GoldenTrace

    def theirs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's own weights [T, K], factor included, and ids [T, K]."""
        of_layer = (self.input_ids,) if self.family.routing.hashed else ()
        with torch.no_grad(), CastsToFloat64():
            _, weights, ids = self.block.gate(self.tokens, *of_layer)
        missing = 1.0 if self.family.router_scales else self.family.routed_scaling_factor
        return missing * weights, ids


@pytest.fixture(scope="module", params=FAMILIES)
def compared(request) -> Compared:
    family = FAMILIES[request.param]
    block = drawn(family)
    generator = torch.Generator().manual_seed(12)
    tokens = torch.randn(T, H, generator=generator, dtype=torch.float64)
    input_ids = torch.randint(VOCAB, (T,), generator=generator)
    weights = family.weights(block)
    routes = select_experts(
        tokens @ weights.gate_weight.T,
        weights.correction_bias,
        family.routing,
        input_ids=input_ids,
        tid2eid=weights.tid2eid,
    )
    trace = golden_forward(
        golden_model(family),
        weights,
        tokens,
        rounding=False,
        input_ids=input_ids,
    )
    return Compared(
        family=family,
        block=block,
        tokens=tokens,
        input_ids=input_ids,
        routes=routes,
        trace=trace,
    )


def golden_model(family: Family) -> GoldenModel:
    return GoldenModel(
        routing=family.routing,
        routed_scaling_factor=family.routed_scaling_factor,
        activation=family.activation,
        recipe=QuantRecipe.BF16,
        scale_format=ScaleFormat.NONE,
    )


def by_expert(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, E] float64: each expert's weight, 0 where not chosen; slot order drops out."""
    return torch.zeros(ids.shape[0], E, dtype=torch.float64).scatter(1, ids, weights)


def test_the_router_is_that_of_transformers(compared):
    weights, ids = compared.theirs()
    ours = compared.family.routed_scaling_factor * compared.routes.weights
    assert_equal_to_1e_12(by_expert(compared.routes.ids, ours), by_expert(ids, weights))


def test_their_router_ran_in_float64(compared):
    assert compared.theirs()[0].dtype == torch.float64


@torch.no_grad()
def test_the_routed_sum_is_that_of_transformers(compared):
    weights, ids = compared.theirs()
    theirs = compared.block.experts(compared.tokens, ids, weights)
    assert_equal_to_1e_12(compared.family.routed_scaling_factor * compared.trace.routed, theirs)


@torch.no_grad()
def test_the_layers_output_is_that_of_transformers(compared):
    of_layer = (compared.input_ids,) if compared.family.routing.hashed else ()
    with CastsToFloat64():
        theirs = compared.block(compared.tokens.unsqueeze(0), *of_layer).squeeze(0)
    assert_equal_to_1e_12(compared.trace.output, theirs)


@pytest.mark.parametrize(
    "changes",
    [{"n_group": 1, "topk_group": 1}, {"topk_group": 3}],
    ids=["no-groups", "three-groups"],
)
def test_the_groups_change_the_choice_in_this_case(changes):
    family = FAMILIES["deepseek_v3"]
    bias = BlockWeights(drawn(family)).correction_bias
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(12), dtype=torch.float64)
    with_groups = select_experts(logits, bias, family.routing).ids
    changed = select_experts(logits, bias, replace(family.routing, **changes)).ids
    assert (with_groups.sort(dim=1).values != changed.sort(dim=1).values).any()

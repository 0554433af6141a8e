"""The ideal golden against transformers' own DeepSeek V4 sparse MoE block, in float64.

Read side by side (transformers 5.24, models/deepseek_v4), the two agree on the layer and differ in
where they do things: transformers multiplies the routed scaling factor into the top-k weights,
always renormalises, adds 1e-20 to the weights' sum, keeps a NaN through the clamp, and leaves the
order of slots and of ties open. All but the epsilon vanish in the sums compared here.
"""

import pytest
import torch
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

from moe.formats import GatedActivation, QuantRecipe, ScaleFormat, ScoringFunc
from moe.golden import GoldenModel, GoldenRouting, GoldenTrace, golden_forward

T, H, WIDTH, E, K = 64, 48, 32, 16, 4
LIMIT, FACTOR = 2.0, 1.5
MODEL = GoldenModel(
    routing=GoldenRouting(top_k=K, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=True),
    routed_scaling_factor=FACTOR,
    activation=GatedActivation(limit=LIMIT),
    recipe=QuantRecipe.BF16,
    scale_format=ScaleFormat.NONE,
)


class BlockWeights:
    """The block's state dict, by name, as golden weights."""

    intermediate_size = WIDTH

    def __init__(self, block: DeepseekV4SparseMoeBlock):
        self.state = block.state_dict()
        self.gate_weight = self.state["gate.weight"]
        self.correction_bias = self.state["gate.e_score_correction_bias"]

    def expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self.state["experts.gate_up_proj"][expert],
            self.state["experts.down_proj"][expert],
        )

    def shared(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up, down = (
            self.state[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return torch.cat([gate, up]), down


@pytest.fixture(scope="module")
def block() -> DeepseekV4SparseMoeBlock:
    config = DeepseekV4Config(
        hidden_size=H,
        moe_intermediate_size=WIDTH,
        n_routed_experts=E,
        num_experts_per_tok=K,
        routed_scaling_factor=FACTOR,
        swiglu_limit=LIMIT,
        num_hidden_layers=1,
        num_hash_layers=0,
    )
    block = DeepseekV4SparseMoeBlock(config, layer_idx=0).double()
    generator = torch.Generator().manual_seed(11)
    for tensor in block.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 3)
    return block


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(12), dtype=torch.float64)


@pytest.fixture(scope="module")
def trace(block, tokens) -> GoldenTrace:
    return golden_forward(MODEL, BlockWeights(block), tokens, rounding=False)


def by_expert(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, E] float64: each expert's weight, 0 where not chosen; slot order drops out."""
    return torch.zeros(ids.shape[0], E, dtype=torch.float64).scatter(1, ids, weights)


def assert_equal_to_1e_12(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12 * expected.abs().max().item())


@torch.no_grad()
def test_routes_and_weights_are_those_of_transformers(block, tokens, trace):
    _, weights, ids = block.gate(tokens)
    golden = by_expert(trace.topk_ids, FACTOR * trace.topk_weights)
    assert_equal_to_1e_12(golden, by_expert(ids, weights))


@torch.no_grad()
def test_the_bias_changes_the_choice_in_this_case(block, tokens, trace):
    without_bias = torch.topk(block.gate.score_fn(trace.logits), K).indices
    assert (without_bias.sort(dim=1).values != trace.topk_ids.sort(dim=1).values).any()


@pytest.mark.parametrize("half", ["gate", "up"])
def test_the_clamp_is_reached_in_this_case(trace, half):
    gate, up = trace.gate_up.chunk(2, dim=2)
    assert (gate.max() if half == "gate" else up.abs().max()) > LIMIT


@torch.no_grad()
def test_the_routed_sum_is_that_of_transformers(block, tokens, trace):
    _, weights, ids = block.gate(tokens)
    assert_equal_to_1e_12(FACTOR * trace.routed, block.experts(tokens, ids, weights))


@torch.no_grad()
def test_the_shared_expert_is_that_of_transformers(block, tokens, trace):
    assert_equal_to_1e_12(trace.shared, block.shared_experts(tokens))


@torch.no_grad()
def test_the_layers_output_is_that_of_transformers(block, tokens, trace):
    assert_equal_to_1e_12(trace.output, block(tokens.unsqueeze(0)).squeeze(0))


@torch.no_grad()
def test_transformers_epsilon_is_the_one_difference_where_scores_vanish(block, tokens):
    # Logits around -90 make scores around e^-45: their sum no longer dwarfs 1e-20.
    weights = BlockWeights(block)
    far_below = torch.full((1, E), -90.0, dtype=torch.float64)
    pushed = torch.linalg.lstsq(weights.gate_weight, far_below.T).solution.T
    _, from_transformers, _ = block.gate(pushed)
    trace = golden_forward(MODEL, weights, pushed, rounding=False)
    total = torch.nn.functional.softplus(trace.logits, threshold=1e9).sqrt()
    chosen = total.gather(1, trace.topk_ids).sum()
    shrunk = trace.topk_weights.sum() * FACTOR * chosen / (chosen + 1e-20)
    assert from_transformers.sum().item() == pytest.approx(shrunk.item(), rel=1e-12)
    assert trace.topk_weights.sum().item() == pytest.approx(1.0, rel=1e-12)

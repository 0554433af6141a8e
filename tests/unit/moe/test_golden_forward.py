"""The golden forward against a loop over tokens, slots and scalars of numpy and ml_dtypes."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from moe.formats import GatedActivation, QuantRecipe, ScaleFormat, ScoringFunc
from moe.golden import GoldenModel, GoldenRouting, RoundingPath, golden_forward

T, H, WIDTH, SHARED_WIDTH, E, K = 7, 128, 128, 256, 5, 3
LIMIT, FACTOR = 1.5, 1.5
RANKS = (1, 0, 2, 1, 0)
BF16_MODEL = GoldenModel(
    routing=GoldenRouting(top_k=K, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=True),
    routed_scaling_factor=FACTOR,
    activation=GatedActivation(limit=LIMIT),
    recipe=QuantRecipe.BF16,
    scale_format=ScaleFormat.NONE,
    path=RoundingPath(ep_size=3, expert_rank=RANKS),
)
FP8_MODEL = replace(BF16_MODEL, recipe=QuantRecipe.FP8_BLOCK128, scale_format=ScaleFormat.UE8M0)
MODELS = pytest.mark.parametrize("model", [BF16_MODEL, FP8_MODEL], ids=["bf16", "fp8_block128"])
BF16_POSITIVE = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
TRACED = ["dispatched", "gate_up", "activation", "expert_output", "routed", "shared", "output"]


class DrawnWeights:
    """Random weights; ``asked`` records which experts were handed over."""

    intermediate_size = WIDTH

    def __init__(self, *, with_shared: bool = True):
        generator = torch.Generator().manual_seed(3)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.gate_weight = drawn(E, H)
        self.correction_bias = drawn(E)
        self.w13, self.w2 = drawn(E, 2 * WIDTH, H) / 8, drawn(E, H, WIDTH) / 8
        self.shared_w = (drawn(2 * SHARED_WIDTH, H) / 8, drawn(H, SHARED_WIDTH) / 8)
        self.with_shared = with_shared
        self.asked: list[int] = []

    def expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(expert)
        return self.w13[expert], self.w2[expert]

    def shared(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.shared_w if self.with_shared else None


@pytest.fixture
def weights() -> DrawnWeights:
    return DrawnWeights()


@pytest.fixture
def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(T, H, generator=generator).to(torch.bfloat16)


def unrounded(x: np.ndarray) -> np.ndarray:
    return x


def bf16(x: np.ndarray) -> np.ndarray:
    """The nearer of the two codes around each value; ml_dtypes' own cast passes through float32."""
    lower = np.searchsorted(BF16_POSITIVE, abs(x), side="right") - 1
    above, below = BF16_POSITIVE[lower + 1] - abs(x), abs(x) - BF16_POSITIVE[lower]
    up = (above < below) | ((above == below) & (lower % 2 == 1))
    return np.copysign(BF16_POSITIVE[lower + up], x)


def fp8_and_back(x: np.ndarray) -> np.ndarray:
    """One row to e4m3 with a power-of-two scale for each 128 columns, and back."""
    back = []
    for group in np.split(x, x.size // 128):
        scale = 2.0 ** math.ceil(math.log2(max(abs(group).max(), 1e-10) / 448))
        back.append((group / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale)
    return np.concatenate(back)


class Loop:
    """The layer, one token and one slot at a time, with the rounding that is handed in."""

    def __init__(self, weights: DrawnWeights, store, quantize, ranks=RANKS):
        self.weights, self.store, self.quantize, self.ranks = weights, store, quantize, ranks

    def mlp(self, x, w13, w2):
        gate_up = self.store(w13.numpy() @ x)
        half = gate_up.size // 2
        gate = np.minimum(gate_up[:half], LIMIT)
        up = np.clip(gate_up[half:], -LIMIT, LIMIT)
        activation = self.quantize(self.store(gate / (1 + np.exp(-gate)) * up))
        return gate_up, activation, self.store(w2.numpy() @ activation)

    def token(self, x, ids, route_weights):
        dispatched = self.quantize(x)
        rows = [self.mlp(dispatched, self.weights.w13[e], self.weights.w2[e]) for e in ids]
        routed = np.zeros(H)
        for rank in range(max(self.ranks) + 1):
            partial = np.zeros(H)
            for expert, weight, (_, _, out) in zip(ids, route_weights, rows, strict=True):
                if self.ranks[expert] == rank:
                    partial += weight * out
            routed += self.store(partial)
        routed = self.store(routed)
        shared = self.mlp(dispatched, *self.weights.shared_w)[2]
        gate_up, activation, out = (np.stack(part) for part in zip(*rows, strict=True))
        output = self.store(shared + FACTOR * routed)
        values = (dispatched, gate_up, activation, out, routed, shared, output)
        return dict(zip(TRACED, values, strict=True))

    def layer(self, x, ids, route_weights):
        tokens = [
            self.token(x[t].double().numpy(), ids[t].tolist(), route_weights[t].tolist())
            for t in range(x.shape[0])
        ]
        return {name: np.stack([token[name] for token in tokens]) for name in TRACED}


def loop_for(model: GoldenModel, weights: DrawnWeights, rounding: bool) -> Loop:
    if not rounding:
        return Loop(weights, unrounded, unrounded)
    quantize = unrounded if model.recipe is QuantRecipe.BF16 else fp8_and_back
    return Loop(weights, bf16, quantize, model.path.expert_rank)


@MODELS
@pytest.mark.parametrize("rounding", [False, True], ids=["ideal", "same_recipe"])
@pytest.mark.parametrize("name", TRACED)
def test_every_traced_value_equals_the_loop(weights, tokens, model, rounding, name):
    trace = golden_forward(model, weights, tokens, rounding=rounding)
    expected = loop_for(model, weights, rounding).layer(tokens, trace.topk_ids, trace.topk_weights)[
        name
    ]
    np.testing.assert_allclose(getattr(trace, name).numpy(), expected, rtol=1e-12, atol=1e-13)


def test_the_clamp_is_reached_in_these_cases(weights, tokens):
    gate_up = golden_forward(BF16_MODEL, weights, tokens, rounding=False).gate_up
    assert (gate_up[..., :WIDTH] > LIMIT).any()
    assert (gate_up[..., WIDTH:].abs() > LIMIT).any()


def test_the_router_reads_the_tokens_before_quantisation(weights, tokens):
    trace = golden_forward(FP8_MODEL, weights, tokens, rounding=True)
    expected = tokens.double().numpy() @ weights.gate_weight.numpy().T
    np.testing.assert_allclose(trace.logits.numpy(), expected, rtol=1e-12, atol=1e-13)


def test_the_router_chooses_by_score_plus_bias(weights, tokens):
    trace = golden_forward(BF16_MODEL, weights, tokens, rounding=False)
    rank_value = np.sqrt(np.log1p(np.exp(trace.logits.numpy()))) + weights.correction_bias.numpy()
    assert trace.topk_ids.tolist() == np.argsort(-rank_value, axis=1)[:, :K].tolist()


def test_ideal_does_not_depend_on_the_recipe(weights, tokens):
    bf16_out = golden_forward(BF16_MODEL, weights, tokens, rounding=False).output
    assert torch.equal(golden_forward(FP8_MODEL, weights, tokens, rounding=False).output, bf16_out)


@MODELS
def test_ideal_does_not_depend_on_where_experts_live(weights, tokens, model):
    other = replace(model, path=RoundingPath(ep_size=5))
    out = golden_forward(model, weights, tokens, rounding=False).output
    assert torch.equal(golden_forward(other, weights, tokens, rounding=False).output, out)


@MODELS
def test_where_experts_live_changes_the_rounding_of_partials(weights, tokens, model):
    one_rank = replace(model, path=RoundingPath())
    routed = golden_forward(model, weights, tokens, rounding=True).routed
    assert not torch.equal(golden_forward(one_rank, weights, tokens, rounding=True).routed, routed)


@MODELS
@pytest.mark.parametrize("name", ["dispatched", "gate_up", "activation", "expert_output", "shared"])
def test_where_experts_live_changes_nothing_before_the_partials(weights, tokens, model, name):
    one_rank = replace(model, path=RoundingPath())
    here = getattr(golden_forward(model, weights, tokens, rounding=True), name)
    assert torch.equal(
        getattr(golden_forward(one_rank, weights, tokens, rounding=True), name), here
    )


@pytest.mark.parametrize("renaming", [(4, 3, 2, 1, 0), (1, 2, 3, 4, 0)], ids=["reversed", "rolled"])
def test_the_names_of_ranks_change_no_bit(weights, tokens, renaming):
    out = golden_forward(FP8_MODEL, weights, tokens, rounding=True).output
    path = RoundingPath(ep_size=5, expert_rank=tuple(renaming[rank] for rank in RANKS))
    renamed = replace(FP8_MODEL, path=path)
    assert torch.equal(golden_forward(renamed, weights, tokens, rounding=True).output, out)


def test_a_layer_without_shared_expert_gives_the_scaled_routed_part(tokens):
    trace = golden_forward(BF16_MODEL, DrawnWeights(with_shared=False), tokens, rounding=False)
    assert trace.shared is None
    assert torch.equal(trace.output, FACTOR * trace.routed)


def test_without_a_limit_the_activation_is_unclamped(weights, tokens):
    trace = golden_forward(
        replace(BF16_MODEL, activation=GatedActivation()), weights, tokens, rounding=False
    )
    gate, up = (half.numpy() for half in trace.gate_up.chunk(2, dim=2))
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(trace.activation.numpy(), expected, rtol=1e-14)


def test_the_recipe_clamps_at_the_limit_as_bf16(weights, tokens):
    # 1.503 is 1.5 in bf16; the ideal clamps at 1.503 itself.
    off_grid = replace(BF16_MODEL, activation=GatedActivation(limit=1.503))
    assert torch.equal(
        golden_forward(off_grid, weights, tokens, rounding=True).activation,
        golden_forward(BF16_MODEL, weights, tokens, rounding=True).activation,
    )


def test_pinned_routes_are_followed(weights, tokens):
    ids = torch.tensor([[4, 0, 2]] * T, dtype=torch.int32)
    pinned = torch.tensor([[0.25, 0.5, 0.125]] * T)
    trace = golden_forward(
        BF16_MODEL, weights, tokens, rounding=True, topk_ids=ids, topk_weights=pinned
    )
    expected = loop_for(BF16_MODEL, weights, True).layer(tokens, ids, pinned)["output"]
    np.testing.assert_allclose(trace.output.numpy(), expected, rtol=1e-12, atol=1e-13)


def test_pinned_ids_alone_take_the_routers_weights(weights, tokens):
    ids = torch.tensor([[4, 0, -1]] * T)
    trace = golden_forward(BF16_MODEL, weights, tokens, rounding=False, topk_ids=ids)
    score = np.sqrt(np.log1p(np.exp(trace.logits.numpy())))[:, [4, 0]]
    expected = np.append(score / score.sum(axis=1, keepdims=True), np.zeros((T, 1)), axis=1)
    np.testing.assert_allclose(trace.topk_weights.numpy(), expected, rtol=1e-14)


def test_pinned_weights_alone_keep_the_routers_ids(weights, tokens):
    free = golden_forward(BF16_MODEL, weights, tokens, rounding=False)
    pinned = torch.full((T, K), 0.25)
    trace = golden_forward(BF16_MODEL, weights, tokens, rounding=False, topk_weights=pinned)
    assert torch.equal(trace.topk_ids, free.topk_ids)
    assert torch.equal(trace.topk_weights, pinned.double())


def test_a_dropped_route_adds_nothing(weights, tokens):
    pinned = torch.tensor([[0.25, 0.5, 0.125]] * T)
    dropped = torch.tensor([[4, -1, 2]] * T)
    trace = golden_forward(
        BF16_MODEL, weights, tokens, rounding=False, topk_ids=dropped, topk_weights=pinned
    )
    expected = 0.25 * trace.expert_output[:, 0] + 0.125 * trace.expert_output[:, 2]
    np.testing.assert_allclose(trace.routed.numpy(), expected.numpy(), rtol=1e-13)


@MODELS
def test_a_layer_of_dropped_routes_gives_the_shared_expert(weights, tokens, model):
    ids = torch.full((T, K), -1)
    trace = golden_forward(model, weights, tokens, rounding=True, topk_ids=ids)
    assert torch.equal(trace.output, trace.shared)


def test_only_experts_with_routes_are_handed_over(weights, tokens):
    ids = torch.tensor([[3, 1, -1]] * T)
    golden_forward(BF16_MODEL, weights, tokens, rounding=False, topk_ids=ids)
    assert weights.asked == [1, 3]


@MODELS
@pytest.mark.parametrize("rounding", [False, True], ids=["ideal", "same_recipe"])
def test_no_tokens_give_empty_values_of_full_width(weights, model, rounding):
    trace = golden_forward(model, weights, torch.zeros(0, H), rounding=rounding)
    widths = [(0, H), (0, K, 2 * WIDTH), (0, K, WIDTH), (0, K, H), (0, H), (0, H), (0, H)]
    assert [tuple(getattr(trace, name).shape) for name in TRACED] == widths


def test_an_infinite_row_stays_with_its_token(weights, tokens):
    poisoned = tokens.clone()
    poisoned[2, 0] = math.inf
    ids = torch.tensor([[4, 0, 2]] * T)
    pinned = torch.full((T, K), 0.25)
    out, clean = (
        golden_forward(FP8_MODEL, weights, x, rounding=True, topk_ids=ids, topk_weights=pinned)
        for x in (poisoned, tokens)
    )
    others = [0, 1, 3, 4, 5, 6]
    assert torch.equal(out.output[others], clean.output[others])


def test_rows_of_experts_are_kept_in_the_widest_dtype_of_them(weights, tokens):
    ids = torch.tensor([[0, 1, -1]]).expand(T, K)
    pins = {"topk_ids": ids, "topk_weights": torch.ones(T, K)}
    whole = golden_forward(BF16_MODEL, weights, tokens, rounding=True, **pins).gate_up
    dtypes = iter([torch.bfloat16, torch.float32])  # of ranks 0 and 1, experts 1 and 0

    def keep(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.shape[1] == 2 * WIDTH and len(rows)
        return rows.to(next(dtypes)) if wide else rows.to(torch.bfloat16)

    kept = golden_forward(BF16_MODEL, weights, tokens, rounding=True, keep=keep, **pins).gate_up
    assert kept.dtype is torch.float32
    assert torch.equal(kept.double(), whole)

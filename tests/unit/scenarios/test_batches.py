"""The global token list of a scenario: drawn alike in any topology, with the routes it pins."""

import pytest
import torch
from safetensors.torch import save_file

from scenarios.batches import batch_of
from scenarios.loader import load_scenario
from scenarios.routings import MADE_LOGITS, MADE_ROUTES

HASHED = ("model.layer=hash_moe", "model.overrides.vocab_size=50")
ONE_GROUP = ("parallel.attention={dp: 1, tp: 2}", "batch.tokens=[8]")


@pytest.fixture
def batch(written):
    """``batch("key=value", ...)``: the tokens of a changed scenario, by mode."""

    def draw(*settings, mode="random"):
        return batch_of(load_scenario(written(), overrides=settings), mode)

    return draw


def test_a_batch_holds_every_groups_tokens(batch):
    drawn = batch()
    assert (drawn.hidden_states.shape, drawn.hidden_states.dtype) == ((8, 256), torch.bfloat16)


def test_a_free_router_gets_no_pins_and_no_ids(batch):
    drawn = batch()
    assert (drawn.input_ids, drawn.topk_ids, drawn.topk_weights) == (None, None, None)


@pytest.mark.parametrize(
    "settings",
    [("batch.tokens=[1, 7]",), ONE_GROUP, ("platform=sm90",), ("moe.recipe=bf16",)],
    ids=["split", "topology", "platform", "recipe"],
)
@pytest.mark.parametrize("kind", ["router", "balanced", "hot_expert"])
def test_tokens_and_routes_depend_on_the_seed_alone(batch, settings, kind):
    routing = f"batch.routing.kind={kind}"
    here, there = batch(routing), batch(routing, *settings)
    assert torch.equal(here.hidden_states, there.hidden_states)
    assert (here.topk_ids is None) == (kind == "router")
    if here.topk_ids is not None:
        assert torch.equal(here.topk_ids, there.topk_ids)


def test_another_seed_draws_other_tokens(batch):
    assert not torch.equal(batch().hidden_states, batch("inputs.seed=8").hidden_states)


def test_a_hashed_layers_tokens_have_ids_of_the_vocabulary(batch):
    ids = batch(*HASHED).input_ids
    assert (ids.shape, ids.dtype) == ((8,), torch.int64)
    assert ids.min() >= 0
    assert ids.max() < 50
    assert ids.unique().numel() > 1


@pytest.mark.parametrize("kind", MADE_ROUTES)
def test_made_routes_are_pinned_with_weights(batch, kind):
    top_k = 4 if kind == "one_rank" else 6
    drawn = batch(f"batch.routing.kind={kind}", f"model.overrides.num_experts_per_tok={top_k}")
    assert drawn.topk_ids.shape == drawn.topk_weights.shape == (8, top_k)


@pytest.mark.parametrize("kind", MADE_ROUTES)
def test_the_router_may_weigh_made_routes(batch, kind):
    drawn = batch(
        f"batch.routing={{kind: {kind}, weights: router}}", "model.overrides.num_experts_per_tok=4"
    )
    assert drawn.topk_ids is not None
    assert drawn.topk_weights is None


def test_weights_alone_are_pinned_where_the_router_chooses(batch):
    drawn = batch("batch.routing={kind: router, weights: pinned}")
    assert drawn.topk_ids is None
    assert drawn.topk_weights.shape == (8, 6)


@pytest.mark.parametrize("kind", MADE_LOGITS)
def test_made_logits_pin_nothing(batch, kind):
    drawn = batch(f"batch.routing.kind={kind}")
    assert (drawn.topk_ids, drawn.topk_weights) == (None, None)


def test_one_rank_means_the_experts_of_one_ep_rank(batch):
    """Eight experts on two ranks: all routes are among 0-3 or among 4-7."""
    drawn = batch("batch.routing.kind=one_rank", "model.overrides.num_experts_per_tok=4")
    assert (drawn.topk_ids // 4).unique().numel() == 1


def test_captured_tokens_are_taken_as_they_are(batch, tmp_path):
    path = tmp_path / "captured.safetensors"
    given = torch.randn(8, 256).to(torch.bfloat16)
    save_file({"hidden_states": given}, path)
    drawn = batch("inputs.modes=[file]", f"inputs.path={path}", mode="file")
    assert torch.equal(drawn.hidden_states, given)

"""The global token list of a scenario's mode, with the routes it pins."""

from pathlib import Path

from torch import Tensor

from moe.batch import Batch
from scenarios.exact_tokens import exact_hidden_states, exact_topk_weights
from scenarios.inputs import (
    captured_hidden_states,
    captured_input_ids,
    input_ids,
    random_hidden_states,
)
from scenarios.loader import LoadedScenario
from scenarios.routings import MADE_ROUTES, made_hidden_states, made_routes
from scenarios.stored import stored_batch


def batch_of(loaded: LoadedScenario, mode: str) -> Batch:
    """Tokens of one mode: drawn from the seed, captured, or stored with the scenario.

    Exact inputs pin the top-k weights, whatever the scenario says of them: no renormalised router
    gives powers of two. The chosen experts stay the scenario's.

    Raises:
        InputError: captured tokens or made routes that do not fit the scenario.
    """
    scenario = loaded.scenario
    num_tokens = sum(scenario.batch.tokens)
    if loaded.stored is not None:
        return stored_batch(loaded.stored, mode, num_tokens, loaded.model.hidden_size)
    ids, weights = _pins(loaded, num_tokens)
    if mode == "exact":
        top_k = loaded.model.num_experts_per_tok
        weights = exact_topk_weights(scenario.inputs.seed, num_tokens, top_k)
    hashed = scenario.model.layer == "hash_moe"
    return Batch(
        hidden_states=_hidden_states(loaded, mode, num_tokens),
        input_ids=_input_ids(loaded, mode, num_tokens) if hashed else None,
        topk_ids=ids,
        topk_weights=weights,
    )


def _input_ids(loaded: LoadedScenario, mode: str, num_tokens: int) -> Tensor:
    vocabulary = loaded.model.vocab_size
    if mode == "file":
        return captured_input_ids(_input_path(loaded), num_tokens, vocabulary)
    return input_ids(loaded.scenario.inputs.seed, num_tokens, vocabulary)


def _input_path(loaded: LoadedScenario) -> Path:
    path = loaded.scenario.inputs.path
    assert path is not None, "the schema demands a path with mode file"
    return Path(path)


def _hidden_states(loaded: LoadedScenario, mode: str, num_tokens: int) -> Tensor:
    hidden_size = loaded.model.hidden_size
    if mode == "file":
        return captured_hidden_states(_input_path(loaded), num_tokens, hidden_size)
    if mode == "exact":
        return exact_hidden_states(loaded.scenario.inputs.seed, num_tokens, hidden_size)
    drawn = random_hidden_states(loaded.scenario.inputs.seed, num_tokens, hidden_size)
    return made_hidden_states(loaded.scenario.batch.routing.kind, drawn)


def _pins(loaded: LoadedScenario, num_tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """Pinned ids and weights; weights alone are pinned where the router chooses freely."""
    scenario, model = loaded.scenario, loaded.model
    routing = scenario.batch.routing
    chosen_freely = routing.kind not in MADE_ROUTES
    if chosen_freely and routing.weights != "pinned":
        return None, None
    ids, weights = made_routes(
        "balanced" if chosen_freely else routing.kind,
        seed=scenario.inputs.seed,
        tokens=num_tokens,
        top_k=model.num_experts_per_tok,
        num_experts=model.n_routed_experts,
        num_local_experts=model.n_routed_experts // scenario.parallel.moe.ep,
    )
    return (
        None if chosen_freely else ids,
        None if routing.weights == "router" else weights,
    )

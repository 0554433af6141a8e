"""Simpler scenarios next to one: fewer modes and rounds, a simpler recipe, features off."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from pydantic import JsonValue

from moe.formats import QuantRecipe
from scenarios.changes import Change, Ladder, valued, values_of
from scenarios.loader import LoadedScenario
from scenarios.models import MoeModel
from scenarios.sections import SwitchesSpec

PLAIN: Final[Mapping[str, JsonValue]] = MappingProxyType(
    {
        "model.layer": "moe",
        "parallel.attention.cp_split": "zigzag",
        "moe.layout": "auto",
        "moe.expanded": "auto",
        "moe.shared_experts": "auto",
        "moe.reduce": "auto",
        "moe.redundant_experts": 0,
        "moe.placement": "contiguous",
        "moe.strict_shapes": False,
        "batch.padding": "auto",
        "batch.routing.kind": "router",
        "batch.routing.weights": "auto",
        "run.backends.transport": "auto",
        "run.backends.kernels": "auto",
        "run.backends.gemm": "auto",
        "allow_unsupported": False,
        **{f"moe.switches.{name}": default for name, default in SwitchesSpec()},
    }
)
"""Key -> the value with which it asks for nothing special."""

SIMPLE_RECIPES: Final = (QuantRecipe.BF16, QuantRecipe.FP8_BLOCK128)
"""The simplest first."""


def modes(loaded: LoadedScenario) -> Iterator[Ladder]:
    """Each mode alone, where there are several; drawn tokens for captured ones."""
    inputs = loaded.scenario.inputs
    alone = tuple(
        Change(
            what=f"modes {', '.join(inputs.modes)} -> {mode}",
            sets={"inputs": {"modes": [mode], "seed": inputs.seed, "path": _path(loaded, mode)}},
        )
        for mode in inputs.modes
        if len(inputs.modes) > 1
    )
    drawn: dict[str, JsonValue] = {"modes": ["random"], "seed": inputs.seed, "path": None}
    captured = Change(what="captured tokens -> drawn", sets={"inputs": drawn})
    yield (captured,) if inputs.modes == ("file",) else alone


def _path(loaded: LoadedScenario, mode: str) -> str | None:
    return loaded.scenario.inputs.path if mode == "file" else None


def rounds(loaded: LoadedScenario) -> Iterator[Ladder]:
    """Fewer forwards on the same buffers."""
    before = loaded.scenario.run.rounds
    yield tuple(
        Change(what=f"rounds {before} -> {fewer}", sets={"run.rounds": fewer})
        for fewer in (1, 2)
        if fewer < before
    )


def recipes(loaded: LoadedScenario) -> Iterator[Ladder]:
    """Simpler number formats."""
    recipe = loaded.scenario.moe.recipe
    at = SIMPLE_RECIPES.index(recipe) if recipe in SIMPLE_RECIPES else len(SIMPLE_RECIPES)
    yield tuple(
        Change(what=f"recipe {recipe} -> {simpler}", sets={"moe.recipe": str(simpler)})
        for simpler in SIMPLE_RECIPES[:at]
    )


def features(loaded: LoadedScenario) -> Ladder:
    """One change a feature that is on: each turns one off, and they may be made together."""
    values = values_of(loaded)
    keys = (
        Change(what=f"{key} {valued(values, key)} -> {plain}", sets={key: plain})
        for key, plain in PLAIN.items()
        if valued(values, key) != plain
    )
    return (*_model_features(loaded.model), *_weights(loaded), *keys)


def faults(loaded: LoadedScenario) -> Iterator[Ladder]:
    """Each injected fault left out, where there are several."""
    texts = loaded.scenario.inject
    yield tuple(
        Change(
            what=f"fault {text} left out", sets={"inject": [*texts[:index], *texts[index + 1 :]]}
        )
        for index, text in enumerate(texts)
        if len(texts) > 1
    )


def _weights(loaded: LoadedScenario) -> Iterator[Change]:
    if loaded.scenario.model.weights.kind == "safetensors":
        drawn = {"kind": "synthetic", "path": None, "layer": None}
        yield Change(what="a checkpoint's weights -> drawn", sets={"model.weights": {**drawn}})


def _model_features(model: MoeModel) -> Iterator[Change]:
    """Parts of a layer that a model may do without."""
    if model.n_shared_experts:
        yield _override("n_shared_experts", model.n_shared_experts, 0)
    if model.swiglu_limit is not None:
        yield _override("swiglu_limit", model.swiglu_limit, None)
    if model.routed_scaling_factor != 1:
        yield _override("routed_scaling_factor", model.routed_scaling_factor, 1.0)
    if model.n_group > 1:
        one_group = {f"model.overrides.{name}": 1 for name in ("n_group", "topk_group")}
        yield Change(what=f"n_group {model.n_group} -> 1", sets={**one_group})


def _override(name: str, before: float, value: JsonValue) -> Change:
    return Change(what=f"{name} {before} -> {value}", sets={f"model.overrides.{name}": value})

"""Which stored tensors are which matrices of a MoE layer, checked against the model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moe.formats import QuantRecipe
from moe.recipes import RECIPES
from scenarios.checkpoint_files import StoredTensor, TensorProblem
from scenarios.checkpoint_fit import LayerFit
from scenarios.checkpoint_forms import BF16, F32, LAYOUTS, MatrixLayout, StoredMatrix
from scenarios.checkpoint_names import (
    BLOCKED_W2,
    BLOCKED_W13,
    CORRECTION_BIAS,
    FUSED_W2,
    FUSED_W13,
    GATE_WEIGHT,
    HASH_TABLE,
    LayerNames,
)
from scenarios.models import CONFIG_NAMES, MoeModel

_EXACT_IN_FP32: Final = (F32, BF16)
_IDS: Final = ("I32", "I64")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMlp:
    """One gated expert.

    w13  matrices that stand on each other's rows, gate first: two, or one that holds both
    w2   [H, I]
    """

    w13: tuple[StoredMatrix, ...]
    w2: StoredMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLayer:
    """One MoE layer of a checkpoint; ``routed`` is by logical expert."""

    routed: tuple[StoredMlp, ...]
    shared: StoredMlp | None
    gate_weight: StoredTensor
    correction_bias: StoredTensor | None
    hash_table: StoredTensor | None = None


def fit_layer(
    layer: LayerNames,
    stored: Mapping[str, StoredTensor],
    model: MoeModel,
    recipe: QuantRecipe,
    *,
    hashed: bool = False,
) -> tuple[StoredLayer, list[TensorProblem]]:
    """Find every tensor that the model needs, and say what is wrong with them.

    Args:
        layer: the names.
        stored: headers by full name; one that is missing here has been reported already.
        model: the sizes wanted.
        recipe: decides the form of the experts, and of the shared one.
        hashed: experts come from a table over token ids, and no correction bias takes part.

    Returns:
        The layer, usable only if the list of problems is empty.
    """
    fit = LayerFit(layer, stored)
    of_routed = LAYOUTS[RECIPES[recipe].checkpoint]
    of_shared = LAYOUTS[RECIPES[RECIPES[recipe].shared].checkpoint]
    routed = _routed(fit, layer, model, of_routed)
    shared = _shared(fit, model, of_shared)
    _refuse_mixtures(fit, routed, of_routed)
    _refuse_mixtures(fit, [shared] if shared else [], of_shared)
    num_experts = model.n_routed_experts
    result = StoredLayer(
        routed=routed,
        shared=shared,
        gate_weight=fit.tensor(GATE_WEIGHT, ((num_experts, model.hidden_size),), (BF16,)),
        correction_bias=(
            fit.tensor(CORRECTION_BIAS, ((num_experts,),), _EXACT_IN_FP32)
            if model.correction_bias and not hashed
            else None
        ),
        hash_table=(
            fit.tensor(HASH_TABLE, ((model.vocab_size, model.num_experts_per_tok),), _IDS)
            if hashed
            else None
        ),
    )
    unread = fit.unread(lambda name: _why_unread(name, model))
    return result, fit.problems + unread


def _routed(
    fit: LayerFit, layer: LayerNames, model: MoeModel, layout: MatrixLayout
) -> tuple[StoredMlp, ...]:
    width, num_experts = model.moe_intermediate_size, model.n_routed_experts
    w13_shape, w2_shape = (2 * width, model.hidden_size), (model.hidden_size, width)
    if not layer.names.keys().isdisjoint((FUSED_W13, FUSED_W2)):
        w13 = fit.fused(FUSED_W13, w13_shape, layout, num_experts)
        w2 = fit.fused(FUSED_W2, w2_shape, layout, num_experts)
    elif not layer.names.keys().isdisjoint((BLOCKED_W13, BLOCKED_W2)):
        w13 = fit.blocked(BLOCKED_W13, w13_shape, layout, num_experts, interleaved=True)
        w2 = fit.blocked(BLOCKED_W2, w2_shape, layout, num_experts, interleaved=False)
    else:
        owners = [f"experts.{expert}" for expert in range(num_experts)]
        return tuple(_mlp(fit, owner, width, model.hidden_size, layout) for owner in owners)
    return tuple(StoredMlp(w13=(both,), w2=down) for both, down in zip(w13, w2, strict=True))


def _shared(fit: LayerFit, model: MoeModel, layout: MatrixLayout) -> StoredMlp | None:
    width = model.shared_intermediate_size
    return _mlp(fit, "shared_experts", width, model.hidden_size, layout) if width else None


def _mlp(fit: LayerFit, owner: str, width: int, hidden: int, layout: MatrixLayout) -> StoredMlp:
    return StoredMlp(
        w13=(
            fit.matrix(f"{owner}.gate_proj.weight", (width, hidden), layout),
            fit.matrix(f"{owner}.up_proj.weight", (width, hidden), layout),
        ),
        w2=fit.matrix(f"{owner}.down_proj.weight", (hidden, width), layout),
    )


def _refuse_mixtures(fit: LayerFit, mlps: Sequence[StoredMlp], layout: MatrixLayout) -> None:
    """Where bf16 experts stay bf16 as they are read, none may stand beside quantised ones."""
    matrices = [matrix.values for mlp in mlps for matrix in (*mlp.w13, mlp.w2)]
    others = {values.dtype for values in matrices} & set(layout.values) - {BF16}
    if layout.quantises or not others:
        return
    message = f"{BF16} beside experts in {' and '.join(sorted(others))}; wanted one for all"
    for values in matrices:
        if values.dtype == BF16:
            fit.report(values, message)


_UNMODELLED: Final[Mapping[str, str]] = {
    r".*(input|activation)_scale": (
        "static activation scales are not modelled; activations are quantised as they come"
    ),
    r"experts\..*bias": "expert biases are no part of this layer's formula",
}


def _why_unread(name: str, model: MoeModel) -> str:
    expert = re.match(r"experts\.(\d+)\.", name)
    if name == CORRECTION_BIAS:
        keys = ", ".join(CONFIG_NAMES["correction_bias"])
        return f"{model.name} declares no correction bias; its config.json key is one of {keys}"
    if name == HASH_TABLE:
        first = f"{model.name} has num_hash_layers {model.num_hash_layers}"
        return f"routes by token id; model.layer 'moe' wants a layer with a router ({first})"
    if name.startswith("shared_experts.") and not model.shared_intermediate_size:
        keys = ", ".join(CONFIG_NAMES["n_shared_experts"])
        return f"{model.name} declares no shared expert; its config.json key is one of {keys}"
    if expert and int(expert[1]) >= model.n_routed_experts:
        return f"{model.name} has {model.n_routed_experts} experts"
    reasons = (why for pattern, why in _UNMODELLED.items() if re.fullmatch(pattern, name))
    return next(reasons, "no part of this layer's formula reads it")

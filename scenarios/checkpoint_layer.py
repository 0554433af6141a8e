"""Which stored tensors are which matrices of a MoE layer, checked against the model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moe.formats import QuantRecipe
from moe.indices import ceil_div
from moe.quant.fp8 import GROUP_SIZE
from scenarios.checkpoint_files import StoredTensor, TensorProblem
from scenarios.checkpoint_names import (
    CORRECTION_BIAS,
    FUSED_W2,
    FUSED_W13,
    GATE_WEIGHT,
    HASH_TABLE,
    LayerNames,
    all_spellings,
)
from scenarios.models import CONFIG_NAMES, MoeModel

_BF16: Final = "BF16"
_E4M3: Final = "F8_E4M3"
_WEIGHT_DTYPES: Final[Mapping[QuantRecipe, tuple[str, ...]]] = {
    QuantRecipe.BF16: (_BF16,),
    QuantRecipe.FP8_BLOCK128: (_E4M3, _BF16),
}
_EXACT_IN_FP32: Final = ("F32", _BF16)
_IDS: Final = ("I32", "I64")
_CONVERT: Final = "; nothing is cast at load, convert the checkpoint first"
_ADVICE: Final[Mapping[str, str]] = {
    "F32": _CONVERT,
    "F16": _CONVERT,
    _E4M3: f"; experts in {_E4M3} are for moe.recipe {QuantRecipe.FP8_BLOCK128}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMatrix:
    """One [N, K] matrix in a checkpoint.

    values  [N, K], or [E, N, K] of which ``expert`` is meant
    scale   fp32 or bf16 [ceil(N/128), ceil(K/128)], or that for each of E; None beside bf16 values
    expert  position in a fused tensor; None: the tensor is the matrix
    """

    values: StoredTensor
    scale: StoredTensor | None
    expert: int | None = None


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
        recipe: bf16 or fp8_block128.
        hashed: experts come from a table over token ids, and no correction bias takes part.

    Returns:
        The layer, usable only if the list of problems is empty.
    """
    fit = _Fit(layer, stored, _WEIGHT_DTYPES[recipe])
    num_experts, hidden = model.n_routed_experts, model.hidden_size
    shared_width = model.shared_intermediate_size
    result = StoredLayer(
        routed=_routed(fit, layer, model),
        shared=_mlp(fit, "shared_experts", shared_width, hidden) if shared_width else None,
        gate_weight=fit.tensor(GATE_WEIGHT, (num_experts, hidden), (_BF16,)),
        correction_bias=(
            fit.tensor(CORRECTION_BIAS, (num_experts,), _EXACT_IN_FP32)
            if model.correction_bias and not hashed
            else None
        ),
        hash_table=(
            fit.tensor(HASH_TABLE, (model.vocab_size, model.num_experts_per_tok), _IDS)
            if hashed
            else None
        ),
    )
    return result, fit.problems + fit.unread(model)


def _routed(fit: "_Fit", layer: LayerNames, model: MoeModel) -> tuple[StoredMlp, ...]:
    hidden, width = model.hidden_size, model.moe_intermediate_size
    experts = range(model.n_routed_experts)
    if layer.names.keys().isdisjoint((FUSED_W13, FUSED_W2)):
        return tuple(_mlp(fit, f"experts.{expert}", width, hidden) for expert in experts)
    w13 = fit.fused(FUSED_W13, (2 * width, hidden), len(experts))
    w2 = fit.fused(FUSED_W2, (hidden, width), len(experts))
    return tuple(StoredMlp(w13=(w13[expert],), w2=w2[expert]) for expert in experts)


def _mlp(fit: "_Fit", owner: str, width: int, hidden: int) -> StoredMlp:
    return StoredMlp(
        w13=(
            fit.matrix(f"{owner}.gate_proj.weight", (width, hidden)),
            fit.matrix(f"{owner}.up_proj.weight", (width, hidden)),
        ),
        w2=fit.matrix(f"{owner}.down_proj.weight", (hidden, width)),
    )


class _Fit:
    """Takes tensors by name; a wrong one becomes a problem and a stand-in, so all are found."""

    def __init__(
        self, layer: LayerNames, stored: Mapping[str, StoredTensor], weight_dtypes: tuple[str, ...]
    ) -> None:
        self._prefix = layer.prefix
        self._left = dict(layer.names)
        self._stored = stored
        self._weight_dtypes = weight_dtypes
        self.problems: list[TensorProblem] = []

    def tensor(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> StoredTensor:
        wanted = _form(shape, *dtypes)
        if name not in self._left:
            spelled = f"{self._prefix}.{all_spellings(name)}"
            self.problems.append(TensorProblem("", spelled, f"missing; wanted {wanted}"))
        stored = self._stored.get(self._left.pop(name, ""))
        if stored is None:
            return StoredTensor(file="", name=name, shape=shape, dtype="")
        if stored.shape != shape or stored.dtype not in dtypes:
            advice = "" if stored.dtype in dtypes else _ADVICE.get(stored.dtype, "")
            read = _form(stored.shape, stored.dtype)
            self._report(stored, f"{read} was read; wanted {wanted}{advice}")
        return stored

    def matrix(self, name: str, shape: tuple[int, int], *experts: int) -> StoredMatrix:
        """The matrix or, with a number of experts, the fused tensor of that many."""
        values = self.tensor(name, (*experts, *shape), self._weight_dtypes)
        scale_name = f"{name}_scale_inv"
        if values.dtype != _E4M3 and scale_name not in self._left:
            return StoredMatrix(values=values, scale=None)
        blocks = tuple(ceil_div(size, GROUP_SIZE) for size in shape)
        scale = self.tensor(scale_name, (*experts, *blocks), _EXACT_IN_FP32)
        if values.dtype == _BF16:
            self._report(
                scale, f"a block scale, but its weight is {_BF16}; wanted one or the other"
            )
        return StoredMatrix(values=values, scale=scale)

    def fused(self, name: str, shape: tuple[int, int], num_experts: int) -> list[StoredMatrix]:
        """The matrices of all experts in one tensor."""
        every = self.matrix(name, shape, num_experts)
        return [
            StoredMatrix(values=every.values, scale=every.scale, expert=expert)
            for expert in range(num_experts)
        ]

    def unread(self, model: MoeModel) -> list[TensorProblem]:
        """A problem for each tensor of the layer that nothing took."""
        return [
            TensorProblem(self._file(full), full, _why_unread(name, model))
            for name, full in self._left.items()
        ]

    def _report(self, stored: StoredTensor, message: str) -> None:
        self.problems.append(TensorProblem(stored.file, stored.name, message))

    def _file(self, full: str) -> str:
        stored = self._stored.get(full)
        return stored.file if stored else ""


def _form(shape: tuple[int, ...], *dtypes: str) -> str:
    return f"{list(shape)} {' or '.join(dtypes)}"


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
    return "no part of this layer's formula reads it"

"""Tokens and weights of a scenario, drawn or read; the rank never enters a draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe.batch import Batch, LayerInput
from moe.formats import QuantRecipe, ScaleFormat
from moe.quant.fp8 import quantize_blocks
from moe.random_tensors import normal, seeded
from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights
from scenarios.errors import InputError
from scenarios.routings import made_bias, made_gate
from topology.sync import PADDING, SyncPlan

PRE_ACTIVATION_STD = 4.0
"""Spread of gate and up, so that a clamp at 10 acts on about one value in a hundred."""

BIAS_STD = 0.1

KEPT_ELEMENTS = 1 << 20
"""Up to this size a drawn matrix is kept: ranks of one process and the golden all ask for it."""

KEPT_EXPERTS_ELEMENTS = 1 << 25
"""Up to this size a rank's experts are kept: ranks that shard them all start from the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWeights:
    """Weights drawn in bf16, one draw a (seed, tensor, expert); fp8 recipes get block scales.

    See ``moe.weights.WeightSource``.

    routing_kind  a made routing may ask for a special gate
    hash_slots    columns of the table of a hash layer; 0: no hash layer
    """

    seed: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    correction_bias: bool
    recipe: QuantRecipe
    routing_kind: str = "router"
    vocab_size: int = 0
    hash_slots: int = 0

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """What a checkpoint of these experts would hold."""
        elements = 3 * len(expert_ids) * self.hidden_size * self.intermediate_size
        draw = _kept_experts if elements <= KEPT_EXPERTS_ELEMENTS else _drawn_experts
        return draw(self, tuple(expert_ids))

    def common(self) -> CommonWeights:
        """What a checkpoint would hold beside the experts."""
        shared = self._shared()
        return CommonWeights(
            shared=self._checkpoint_form(*(w[None] for w in shared)) if shared else None,
            gate_weight=made_gate(
                self.routing_kind,
                self._matrix("gate_weight", self.num_experts, self.hidden_size, std=1.0),
            ),
            correction_bias=made_bias(self.routing_kind, self._correction_bias()),
            tid2eid=self._tid2eid() if self.hash_slots else None,
        )

    def _tid2eid(self) -> Tensor:
        """[V, K] int32: distinct experts for every vocabulary id.

        Steps of a length coprime to E through a drawn order of the experts never meet twice.
        """
        generator = seeded(self.seed, "tid2eid")
        order = torch.randperm(self.num_experts, generator=generator)
        coprime = [s for s in range(1, self.num_experts + 1) if gcd(s, self.num_experts) == 1]
        start, step = (
            torch.randint(high, (self.vocab_size, 1), generator=generator)
            for high in (self.num_experts, len(coprime))
        )
        places = start + torch.tensor(coprime)[step] * torch.arange(self.hash_slots)
        return order[places % self.num_experts].to(torch.int32)

    def ideal_expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        """The drawn values themselves, float64."""
        w13, w2 = self._expert(expert_id)
        return w13.to(torch.float64), w2.to(torch.float64)

    def ideal_shared(self) -> tuple[Tensor, Tensor] | None:
        """The drawn values themselves, float64."""
        shared = self._shared()
        return (shared[0].to(torch.float64), shared[1].to(torch.float64)) if shared else None

    def _expert(self, expert_id: int) -> tuple[Tensor, Tensor]:
        return self._gated_mlp("expert", self.intermediate_size, expert_id)

    def _shared(self) -> tuple[Tensor, Tensor] | None:
        width = self.shared_intermediate_size
        return self._gated_mlp("shared_expert", width, 0) if width else None

    def _gated_mlp(self, name: str, width: int, expert_id: int) -> tuple[Tensor, Tensor]:
        w13 = self._matrix(
            f"{name}.w13", 2 * width, self.hidden_size, expert_id, std=PRE_ACTIVATION_STD
        )
        return w13, self._matrix(f"{name}.w2", self.hidden_size, width, expert_id, std=1.0)

    def _matrix(self, name: str, n: int, k: int, expert_id: int = 0, *, std: float) -> Tensor:
        draw = _kept if n * k <= KEPT_ELEMENTS else _drawn
        return draw(self.seed, name, expert_id, n, k, std / k**0.5)

    def _correction_bias(self) -> Tensor | None:
        if not self.correction_bias:
            return None
        generator = seeded(self.seed, "correction_bias")
        return torch.randn(self.num_experts, generator=generator) * BIAS_STD

    def drawn_experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """``experts``, made anew."""
        drawn = [self._expert(expert) for expert in expert_ids]
        return self._checkpoint_form(
            torch.stack([w13 for w13, _ in drawn]), torch.stack([w2 for _, w2 in drawn])
        )

    def _checkpoint_form(self, w13: Tensor, w2: Tensor) -> ExpertWeights:
        return ExpertWeights(w13=self._quantized(w13), w2=self._quantized(w2))

    def _quantized(self, matrix: Tensor) -> ExpertMatrix:
        if self.recipe is QuantRecipe.BF16:
            return ExpertMatrix(values=matrix, scale=None)
        blocks = quantize_blocks(matrix, ScaleFormat.FP32)
        return ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)


def _drawn(seed: int, name: str, index: int, n: int, k: int, std: float) -> Tensor:
    """[N, K] bf16 of one named matrix; to be read only."""
    return normal(seeded(seed, name, index), n, k, std=std)


_kept = lru_cache(maxsize=256)(_drawn)


def _drawn_experts(source: SyntheticWeights, expert_ids: tuple[int, ...]) -> ExpertWeights:
    """To be read only."""
    return source.drawn_experts(expert_ids)


_kept_experts = lru_cache(maxsize=2)(_drawn_experts)


def random_hidden_states(
    seed: int, num_tokens: int, hidden_size: int, name: str = "hidden_states"
) -> Tensor:
    """[T, H] bf16: the global token list, normal, drawn token after token."""
    return normal(seeded(seed, name), num_tokens, hidden_size)


def captured_hidden_states(path: Path, num_tokens: int, hidden_size: int) -> Tensor:
    """[T, H] bf16 read from ``hidden_states`` of a safetensors file.

    Raises:
        InputError: unreadable file, missing tensor, another shape or dtype, or values that are no
            numbers.
    """
    hidden_states = _captured(path, "hidden_states")
    if tuple(hidden_states.shape) != (num_tokens, hidden_size):
        raise InputError(
            f"{path}: hidden_states is {list(hidden_states.shape)}; batch.tokens and the model "
            f"want [{num_tokens}, {hidden_size}]"
        )
    if hidden_states.dtype != torch.bfloat16:
        raise InputError(f"{path}: hidden_states is {hidden_states.dtype}; bf16 is wanted")
    numbers = hidden_states.isfinite().all(dim=1)
    if not bool(numbers.all()):
        first = int((~numbers).nonzero()[0])
        raise InputError(f"{path}: token {first} of hidden_states holds NaN or infinity")
    return hidden_states


def captured_input_ids(path: Path, num_tokens: int, vocab_size: int) -> Tensor:
    """[T] int64 read from ``input_ids`` of a safetensors file.

    Raises:
        InputError: unreadable file, missing tensor, another shape, no integers, or ids outside the
            vocabulary.
    """
    ids = _captured(path, "input_ids")
    if tuple(ids.shape) != (num_tokens,) or ids.dtype not in (torch.int32, torch.int64):
        raise InputError(
            f"{path}: input_ids is {list(ids.shape)} {ids.dtype}; "
            f"[{num_tokens}] integers are wanted"
        )
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if outside.numel():
        first = int(outside[0])
        raise InputError(f"{path}: token {first} has id {int(ids[first])} of {vocab_size}")
    return ids.to(torch.int64)


def _captured(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as tensors:
            names = list(tensors.keys())
            if name not in names:
                raise InputError(f"{path}: no tensor {name}; it holds {', '.join(names)}")
            captured: Tensor = tensors.get_tensor(name)
            return captured
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error


def input_ids(seed: int, num_tokens: int, vocab_size: int) -> Tensor:
    """[T] int64 vocabulary ids of the global token list."""
    return torch.randint(vocab_size, (num_tokens,), generator=seeded(seed, "input_ids"))


def deal(batch: Batch, sync: SyncPlan, padding_seed: int = 0) -> list[LayerInput]:
    """What each rank is handed: the tokens of its rows.

    Padding rows hold numbers of their own, drawn, so that one that reaches a token shows; they
    carry vocabulary id 0 and no pinned route.

    Args:
        batch: the global token list.
        sync: which token stands in which row of which rank.
        padding_seed: of the padding rows; the rank never enters.
    """
    most = max((rows.count(PADDING) for rows in sync.entry), default=0)
    padding = random_hidden_states(padding_seed, most, batch.hidden_states.shape[1], "padding")
    return [
        _dealt_to(batch, padding, entry, layer)
        for entry, layer in zip(sync.entry, sync.layer, strict=True)
    ]


def _dealt_to(
    batch: Batch, padding: Tensor, entry: Sequence[int], layer: Sequence[int]
) -> LayerInput:
    own, at = (torch.tensor(rows, dtype=torch.int64) for rows in (entry, layer))
    hidden_states = take_tokens(batch.hidden_states, own, 0)
    assert hidden_states is not None
    hidden_states[own == PADDING] = padding[: int((own == PADDING).sum())]
    return LayerInput(
        hidden_states=hidden_states,
        input_ids=take_tokens(batch.input_ids, own, 0),
        topk_ids=take_tokens(batch.topk_ids, at, -1),
        topk_weights=take_tokens(batch.topk_weights, at, 0),
    )


def take_tokens(values: Tensor | None, tokens: Tensor, filler: int) -> Tensor | None:
    """Rows of these tokens, ``filler`` where there is none; None of None."""
    if values is None:
        return None
    taken = values.new_full((len(tokens), *values.shape[1:]), filler)
    real = tokens != PADDING
    taken[real] = values[tokens[real]]
    return taken

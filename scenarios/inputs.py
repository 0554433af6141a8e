"""Tokens and weights of a scenario, drawn or read; the rank never enters a draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.quant.fp8 import quantize_blocks
from moe.random_tensors import normal, seeded
from moe.weights import CommonWeights, ExpertMatrix, ExpertWeights
from scenarios.errors import UserError

PRE_ACTIVATION_STD = 4.0
"""Spread of gate and up, so that a clamp at 10 acts on about one value in a hundred."""

BIAS_STD = 0.1


class InputError(UserError):
    """A captured input file does not fit the scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWeights:
    """Weights drawn in bf16, one draw a (seed, tensor, expert); fp8 recipes get block scales.

    See ``moe.weights.WeightSource``.
    """

    seed: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    correction_bias: bool
    recipe: QuantRecipe

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """What a checkpoint of these experts would hold."""
        drawn = [self._expert(expert) for expert in expert_ids]
        return self._checkpoint_form(
            torch.stack([w13 for w13, _ in drawn]), torch.stack([w2 for _, w2 in drawn])
        )

    def common(self) -> CommonWeights:
        """What a checkpoint would hold beside the experts."""
        shared = self._shared()
        return CommonWeights(
            shared=self._checkpoint_form(*(w[None] for w in shared)) if shared else None,
            gate_weight=self._matrix("gate_weight", self.num_experts, self.hidden_size, std=1.0),
            correction_bias=self._correction_bias(),
        )

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
        return normal(seeded(self.seed, name, expert_id), n, k, std=std / k**0.5)

    def _correction_bias(self) -> Tensor | None:
        if not self.correction_bias:
            return None
        generator = seeded(self.seed, "correction_bias")
        return torch.randn(self.num_experts, generator=generator) * BIAS_STD

    def _checkpoint_form(self, w13: Tensor, w2: Tensor) -> ExpertWeights:
        return ExpertWeights(w13=self._quantized(w13), w2=self._quantized(w2))

    def _quantized(self, matrix: Tensor) -> ExpertMatrix:
        if self.recipe is QuantRecipe.BF16:
            return ExpertMatrix(values=matrix, scale=None)
        blocks = quantize_blocks(matrix, ScaleFormat.FP32)
        return ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)


def random_hidden_states(seed: int, num_tokens: int, hidden_size: int) -> Tensor:
    """[T, H] bf16: the global token list, normal, drawn token after token."""
    return normal(seeded(seed, "hidden_states"), num_tokens, hidden_size)


def captured_hidden_states(path: Path, num_tokens: int, hidden_size: int) -> Tensor:
    """[T, H] bf16 read from ``hidden_states`` of a safetensors file.

    Raises:
        InputError: unreadable file, missing tensor, another shape or dtype, or values that are no
            numbers.
    """
    try:
        with safe_open(path, framework="pt") as tensors:
            names = list(tensors.keys())
            if "hidden_states" not in names:
                raise InputError(f"{path}: no tensor hidden_states; it holds {', '.join(names)}")
            hidden_states: Tensor = tensors.get_tensor("hidden_states")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error
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


def deal(hidden_states: Tensor, tokens: Sequence[int]) -> list[Tensor]:
    """The global token list split into one run a group, in group order."""
    return list(torch.split(hidden_states, list(tokens)))

"""Weights of a scenario, drawn and brought into the form of a checkpoint of its recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from moe.formats import QuantRecipe
from moe.random_tensors import gaussian, hashed_normal, integers, normal, permutation, seeded
from moe.recipes import RECIPES, WeightFormat
from moe.weights import CommonWeights, ExpertWeights
from scenarios.routings import made_bias, made_gate
from scenarios.weight_forms import checkpoint_form

PRE_ACTIVATION_STD = 4.0
"""Spread of gate and up, so that a clamp at 10 acts on about one value in a hundred."""

BIAS_STD = 0.1

KEPT_ELEMENTS = 1 << 20
"""Up to this size a drawn matrix is kept: ranks of one process and the golden all ask for it.

Larger ones are hashed whenever they are asked for, where they are needed.
"""

KEPT_EXPERTS_ELEMENTS = 1 << 25
"""Up to this size a rank's experts are kept: ranks that shard them all start from the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticWeights:
    """Weights drawn in bf16, one draw a (seed, tensor, expert), in the recipe's checkpoint form.

    The shared expert has the form of the recipe's shared expert. See ``moe.weights.WeightSource``.

    routing_kind         a made routing may ask for a special gate
    hash_slots           columns of the table of a hash layer; 0: no hash layer
    power_of_two_scales  a checkpoint made for a GEMM that takes no other scales; counts where a
                         whole matrix has one, which no preparation rounds again
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
    power_of_two_scales: bool = False

    def experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """What a checkpoint of these experts would hold."""
        elements = 3 * len(expert_ids) * self.hidden_size * self.intermediate_size
        draw = _kept_experts if elements <= KEPT_EXPERTS_ELEMENTS else _drawn_experts
        return draw(self, tuple(expert_ids), torch.get_default_device())

    def common(self) -> CommonWeights:
        """What a checkpoint would hold beside the experts."""
        return CommonWeights(
            shared=self._stored_shared(),
            gate_weight=made_gate(self.routing_kind, self.gate_matrix()),
            correction_bias=made_bias(self.routing_kind, self._correction_bias()),
            tid2eid=self._tid2eid() if self.hash_slots else None,
        )

    def _tid2eid(self) -> Tensor:
        """[V, K] int32: distinct experts for every vocabulary id.

        Steps of a length coprime to E through a drawn order of the experts never meet twice.
        """
        generator = seeded(self.seed, "tid2eid")
        order = permutation(generator, self.num_experts)
        coprime = [s for s in range(1, self.num_experts + 1) if gcd(s, self.num_experts) == 1]
        start, step = (
            integers(generator, 0, high, self.vocab_size, 1)
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
        return self.gated_mlp("expert", self.intermediate_size, expert_id)

    def _shared(self) -> tuple[Tensor, Tensor] | None:
        width = self.shared_intermediate_size
        return self.gated_mlp("shared_expert", width, 0) if width else None

    def gate_matrix(self) -> Tensor:
        """[E, H] bf16 of the router, whatever the routing; to be read only."""
        return self._matrix("gate_weight", self.num_experts, self.hidden_size, std=1.0)

    def gated_mlp(self, name: str, width: int, expert_id: int) -> tuple[Tensor, Tensor]:
        """(w13 [2W, H], w2 [H, W]) bf16 of ``expert`` or ``shared_expert``; to be read only."""
        w13 = self._matrix(
            f"{name}.w13", 2 * width, self.hidden_size, expert_id, std=PRE_ACTIVATION_STD
        )
        return w13, self._matrix(f"{name}.w2", self.hidden_size, width, expert_id, std=1.0)

    def _matrix(self, name: str, n: int, k: int, expert_id: int = 0, *, std: float) -> Tensor:
        std /= k**0.5
        if n * k > KEPT_ELEMENTS:
            return hashed_normal(self.seed, name, expert_id, shape=(n, k), std=std)
        return _kept(self.seed, name, expert_id, n, k, std, torch.get_default_device())

    def _correction_bias(self) -> Tensor | None:
        if not self.correction_bias:
            return None
        generator = seeded(self.seed, "correction_bias")
        return gaussian(generator, self.num_experts) * BIAS_STD

    def drawn_experts(self, expert_ids: Sequence[int]) -> ExpertWeights:
        """``experts``, made anew."""
        drawn = [self._expert(expert) for expert in expert_ids]
        w13 = torch.stack([w13 for w13, _ in drawn])
        w2 = torch.stack([w2 for _, w2 in drawn])
        return self._in_form(w13, w2, RECIPES[self.recipe].checkpoint)

    def _stored_shared(self) -> ExpertWeights | None:
        shared = self._shared()
        if shared is None:
            return None
        form = RECIPES[RECIPES[self.recipe].shared].checkpoint
        return self._in_form(shared[0][None], shared[1][None], form)

    def _in_form(self, w13: Tensor, w2: Tensor, form: WeightFormat) -> ExpertWeights:
        pow2 = self.power_of_two_scales
        return ExpertWeights(
            w13=checkpoint_form(w13, form, parts=2, power_of_two_scales=pow2),
            w2=checkpoint_form(w2, form, power_of_two_scales=pow2),
        )


@lru_cache(maxsize=256)
def _kept(
    seed: int, name: str, index: int, n: int, k: int, std: float, device: torch.device
) -> Tensor:
    """[N, K] bf16 of one named matrix on the default device; to be read only."""
    return normal(seeded(seed, name, index), n, k, std=std)


def _drawn_experts(
    source: SyntheticWeights, expert_ids: tuple[int, ...], device: torch.device
) -> ExpertWeights:
    """On the default device; to be read only."""
    return source.drawn_experts(expert_ids)


_kept_experts = lru_cache(maxsize=2)(_drawn_experts)

"""What the golden forward is given and gives back: the model, its weights, the trace."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden.path import ONE_RANK, RoundingPath
from moe.golden.routing import GoldenRouting

_ACTIVATION_GROUP: Final[Mapping[QuantRecipe, int | None]] = MappingProxyType(
    {
        QuantRecipe.BF16: None,
        QuantRecipe.FP8_BLOCK128: 128,
        QuantRecipe.MXFP8: 32,
        QuantRecipe.MXFP4_W4A8: 128,
        QuantRecipe.MXFP4_AS_FP8: 128,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenModel:
    """What the layer computes, apart from its weights.

    Attributes:
        routing: the router's rule.
        routed_scaling_factor: multiplies the routed sum, once.
        swiglu_limit: clamp of gate and up; None: no clamp.
        recipe: which activations are quantised.
        scale_format: of the activations' scales; NONE for bf16 and for nothing else.
        path: which ranks and shards store partial sums; by default one rank does.
    """

    routing: GoldenRouting
    routed_scaling_factor: float
    swiglu_limit: float | None
    recipe: QuantRecipe
    scale_format: ScaleFormat
    path: RoundingPath = ONE_RANK

    def __post_init__(self) -> None:
        if self.recipe not in _ACTIVATION_GROUP:
            modelled = ", ".join(_ACTIVATION_GROUP)
            raise ValueError(f"recipe {self.recipe} has no golden model; modelled: {modelled}")
        if (self.activation_group is None) != (self.scale_format is ScaleFormat.NONE):
            raise ValueError(f"recipe {self.recipe} cannot have {self.scale_format} scales")

    @property
    def activation_group(self) -> int | None:
        """Columns of an activation row that share a scale; None: activations stay bf16."""
        return _ACTIVATION_GROUP[self.recipe]


class GoldenWeights(Protocol):
    """Weights in float64, dequantised by the caller, handed over one expert at a time."""

    @property
    def gate_weight(self) -> Tensor:
        """[E, H] float64, the router's."""

    @property
    def correction_bias(self) -> Tensor | None:
        """[E] float64, added to the scores for the choice alone."""

    @property
    def tid2eid(self) -> Tensor | None:
        """[V, K] integers, the experts of each token id in a hashed layer; else not asked for."""

    @property
    def intermediate_size(self) -> int:
        """I of the routed experts."""

    def expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """w13 [2I, H] float64, gate rows first, and w2 [H, I] float64 of one routed expert."""

    def shared(self) -> tuple[Tensor, Tensor] | None:
        """The shared expert's w13 and w2, its own I; None if the layer has none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenTrace:
    """The layer's values in canonical coordinates: global tokens, top-k slots, whole columns.

    All float64 but topk_ids. Rows of a dropped route are zeros.

    logits         [T, E]
    topk_ids       [T, K] int64, global experts, -1 = dropped
    topk_weights   [T, K]      without the routed scaling factor
    dispatched     [T, H]      dequantised input of GEMM1
    gate_up        [T, K, 2I]  GEMM1 output
    activation     [T, K, I]   dequantised input of GEMM2
    expert_output  [T, K, H]   GEMM2 output; where it is sharded, the sum of the stored shards
    routed         [T, H]      after combine, where the path does not fold in the routed scaling
                               factor; otherwise the sum of the ranks' partials, with the factor
    shared         [T, H]      shared expert's output, sharded as above; None if there is none
    output         [T, H]      after the last addition
    """

    logits: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    dispatched: Tensor
    gate_up: Tensor
    activation: Tensor
    expert_output: Tensor
    routed: Tensor
    shared: Tensor | None
    output: Tensor

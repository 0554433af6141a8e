"""What the golden forward is given and gives back: the model, its weights, the trace."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from torch import Tensor

from moe.formats import (
    ActivationKind,
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    QuantRecipe,
    ScaleFormat,
)
from moe.golden.path import ONE_RANK, RoundingPath
from moe.golden.routing import GoldenRouting

_ACTIVATION_GROUP: Final[Mapping[QuantRecipe, int | None]] = MappingProxyType(
    {
        QuantRecipe.BF16: None,
        QuantRecipe.FP8_BLOCK128: 128,
        QuantRecipe.FP8_PER_TENSOR: 128,
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
        activation: between the GEMMs.
        recipe: which activations are quantised.
        scale_format: of the activations' scales; NONE for bf16 and for nothing else.
        wire_format: of what dispatch quantises; rows with other scales than ``scale_format`` are
            quantised again in front of GEMM1. None: the same.
        input_group: columns of a row that share a scale in front of the experts' GEMM1, where that
            is not the recipe's usual group; None: it is.
        expert_hidden_size: columns of a row in front of padded experts; None: as many as it has.
        path: which ranks and shards store partial sums; by default one rank does.
        twin: seed of a twin, whose forward with rounding sums in fp32 and in an order of its own;
            None: the golden.
    """

    routing: GoldenRouting
    routed_scaling_factor: float
    activation: GatedActivation
    recipe: QuantRecipe
    scale_format: ScaleFormat
    wire_format: ScaleFormat | None = None
    input_group: int | None = None
    expert_hidden_size: int | None = None
    path: RoundingPath = ONE_RANK
    twin: int | None = None

    def __post_init__(self) -> None:
        if (self.activation_group is None) != (self.scale_format is ScaleFormat.NONE):
            raise ValueError(f"recipe {self.recipe} cannot have {self.scale_format} scales")

    @property
    def activation_group(self) -> int | None:
        """Columns of an activation row that share a scale; None: activations stay bf16."""
        return activation_group(self.recipe)

    @property
    def middle_group(self) -> int | None:
        """The same in front of the experts' second GEMM."""
        return middle_group(self.recipe, self.activation, self.path.layout)


def shared_recipe(recipe: QuantRecipe) -> QuantRecipe:
    """The shared expert's: checkpoints with fp4 experts hold it in fp8 blocks."""
    is_fp4 = recipe in (QuantRecipe.MXFP4_W4A8, QuantRecipe.MXFP4_AS_FP8)
    return QuantRecipe.FP8_BLOCK128 if is_fp4 else recipe


def activation_group(recipe: QuantRecipe) -> int | None:
    """Columns of an activation row that share a scale; None: activations stay bf16."""
    return _ACTIVATION_GROUP[recipe]


def wire_group(recipe: QuantRecipe, dispatcher: DispatchFormat) -> int | None:
    """The same where dispatch quantises: DeepEP's first two modes, and their like, know 128 alone.

    Source: SGLang 0.5.21, token_dispatcher/deepep.py; DeepEP, internode_ll.cu.
    """
    usual = activation_group(recipe)
    first_two = dispatcher is DispatchFormat.DEEPEP_NORMAL or dispatcher.is_low_latency
    return 128 if usual and first_two else usual


def middle_group(
    recipe: QuantRecipe, activation: GatedActivation, layout: GemmLayout
) -> int | None:
    """The same in front of the experts' second GEMM: situ's kernel of slabs knows 128 alone."""
    usual = activation_group(recipe)
    of_situ = activation.kind is ActivationKind.SITU and layout is GemmLayout.MASKED
    return 128 if usual and of_situ else usual


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
class GoldenTokens:
    """Where every token goes and what comes out, in global order; all float64 but topk_ids.

    topk_ids      [T, K] int64, global experts, -1 = dropped
    topk_weights  [T, K]  without the routed scaling factor
    output        [T, H]  after the last addition
    """

    topk_ids: Tensor
    topk_weights: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenTrace(GoldenTokens):
    """The layer's values in canonical coordinates: global tokens, top-k slots, whole columns.

    All float64. Rows of a dropped route are zeros. Those of routes are K times as many as of
    tokens, and most of the memory.

    logits         [T, E]
    routed         [T, H]      after combine, where the path does not fold in the routed scaling
                               factor; otherwise the sum of the ranks' partials, with the factor
    shared         [T, H]      shared expert's output; where it is sharded, the sum of the stored
                               shards; None: there is none
    dispatched     [T, H]      dequantised input of GEMM1
    gate_up        [T, K, 2I]  GEMM1 output
    activation     [T, K, I]   dequantised input of GEMM2
    expert_output  [T, K, H]   GEMM2 output; where it is sharded, the sum of the stored shards
    """

    logits: Tensor
    routed: Tensor
    shared: Tensor | None
    dispatched: Tensor
    gate_up: Tensor
    activation: Tensor
    expert_output: Tensor

    @property
    def of_tokens(self) -> GoldenTokens:
        """What is left of it once its stages are judged."""
        return GoldenTokens(
            topk_ids=self.topk_ids, topk_weights=self.topk_weights, output=self.output
        )

"""The sections of a scenario that say what is computed: model, topology, MoE choices."""

from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from moe.formats import DispatchFormat, QuantRecipe
from scenarios.presets import Preset


class Spec(BaseModel):
    """Base of every section: unknown keys refused, nothing coerced, nothing mutable.

    A field's docstring is its line in the reference page and in the JSON schema.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class WeightsSpec(Spec):
    """Where the layer's weights come from."""

    kind: Literal["synthetic", "safetensors"] = "synthetic"
    """Drawn from the seed, or read from a checkpoint."""
    path: str | None = None
    """With `safetensors`: a file, or the index of a sharded checkpoint; relative to this file."""
    layer: NonNegativeInt | None = None
    """With `safetensors`: which layer of the checkpoint."""

    @model_validator(mode="after")
    def _a_checkpoint_has_a_path_and_a_layer(self) -> Self:
        given = self.path is not None, self.layer is not None
        if self.kind == "safetensors" and given != (True, True):
            raise ValueError("kind 'safetensors' needs both path and layer")
        if self.kind == "synthetic" and given != (False, False):
            raise ValueError("path and layer belong to kind 'safetensors', kind is 'synthetic'")
        return self


class ModelSpec(Spec):
    """Whose MoE layer runs: exactly one of `preset` and `hf_config`, with `overrides` on top."""

    preset: Preset | None = None
    """A published model by name."""
    hf_config: str | None = None
    """A published config.json, unmodified; relative to this file."""
    overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """Sizes that differ from the model's, by their config.json names."""
    layer: Literal["moe", "hash_moe"] = "moe"
    """Routed by the router, or by a table over token ids (the first layers of DeepSeek V4)."""
    weights: WeightsSpec = WeightsSpec()
    """Where the layer's weights come from."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.preset is None) == (self.hf_config is None):
            raise ValueError("give one of preset and hf_config")
        return self


class AttentionParallel(Spec):
    """How attention uses the ranks; dp * tp * cp is the world size."""

    dp: PositiveInt
    """Data-parallel groups, each with tokens of its own."""
    tp: PositiveInt = 1
    """Ranks that hold the same tokens and split the attention heads."""
    cp: PositiveInt = 1
    """Ranks that split one sequence."""
    cp_split: Literal["zigzag", "contiguous"] = "zigzag"
    """With cp: rank i holds blocks i and 2*cp-1-i of a sequence, or its i-th part."""


class MoeParallel(Spec):
    """How the experts use the same ranks; ep * tp is the world size."""

    ep: PositiveInt
    """Expert-parallel ranks, each with a block of whole experts."""
    tp: PositiveInt = 1
    """Ranks that split each expert's intermediate axis."""


class ParallelSpec(Spec):
    """The two views of one set of ranks."""

    world_size: PositiveInt
    """Ranks in all."""
    attention: AttentionParallel
    """The attention's view."""
    moe: MoeParallel
    """The experts' view."""


class SwitchesSpec(Spec):
    """SGLang 0.5.21 environment switches that change semantics; the defaults are SGLang's."""

    compact_eager: bool = False
    """SGLANG_OPT_DG_COMPACT_EAGER: compact layout outside graph capture."""
    masked_memory_budget_fraction: float = Field(default=0.25, gt=0, le=1)
    """SGLANG_DEEPGEMM_MASKED_MEMORY_BUDGET_FRACTION: free memory that slabs may take."""
    masked_m_cap: bool = False
    """SGLANG_OPT_DG_MASKED_M_CAP: slabs as tall as the fullest expert needs."""
    mask_dp_pad_moe: bool = False
    """SGLANG_OPT_MASK_DP_PAD_MOE: padded rows are unrouted again after the id mapping."""
    dp_use_gatherv: bool = False
    """SGLANG_DP_USE_GATHERV: gather of unequal sizes before the MoE, reduce-scatter after it."""
    dp_use_reduce_scatter: bool = False
    """SGLANG_DP_USE_REDUCE_SCATTER: reduce-scatter of equal slots instead of all-reduce."""
    dp_gather_fp8: bool = False
    """SGLANG_ENABLE_DP_GATHER_FP8: the DP gather's wire is fp8, before routing."""
    shared_expert_tp1: bool = False
    """SGLANG_SHARED_EXPERT_TP1: the shared expert is whole on every rank."""
    dp_shared_expert_local: bool = False
    """SGLANG_DP_SHARED_EXPERT_LOCAL: the shared expert sees local rows, before the gather."""
    deepep_bf16_dispatch: bool = False
    """SGLANG_DEEPEP_BF16_DISPATCH: DeepEP's wire is bf16."""
    deepep_v2_force_max_len: bool = False
    """SGLANG_DEEPEP_V2_FORCE_MAX_LEN: every DP slot is padded to the longest."""
    max_dispatch_tokens_per_rank: PositiveInt | None = None
    """SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK, SGLANG_DEEPEP_V2_NUM_MAX_... and, for decode,
    SGLANG_FLASHINFER_NUM_MAX_...: null is the dispatcher's default, 128, 128 and 4096."""
    silu_mul_keep_fp32: bool = False
    """silu_mul_keep_fp32 of the model's registry entry (deepep_v2 with mxfp8): silu's product goes
    to the quantiser in fp32; none of the models that SGLang registers asks for it."""
    deterministic: bool = False
    """--enable-deterministic-inference: scatter buffers are zeroed."""


class MoeSpec(Spec):
    """The choices inside the MoE layer; `auto` is resolved and recorded in the result."""

    dispatcher: DispatchFormat
    """How tokens reach the ranks that own their experts."""
    runner: Literal["auto", "deep_gemm"] = "auto"
    """Who computes the grouped GEMMs."""
    layout: Literal["auto", "masked", "compact"] = "auto"
    """SGLANG_DEEPGEMM_STANDARD_LAYOUT: one slab an expert, or expert segments end to end; auto is
    SGLang's rule. DeepEP dispatchers fix it."""
    expanded: Literal["auto", True, False] = "auto"
    """deepep_v2 alone: one row a route instead of one a token; auto: in decode."""
    recipe: QuantRecipe
    """Number formats of weights and activations."""
    shared_experts: Literal["auto", "tp_sharded", "replicated", "local"] = "auto"
    """Where the shared expert is computed and added."""
    reduce: Literal["auto", "all_reduce", "reduce_scatter", "reduce_scatter_v", "dp_scatter"] = (
        "auto"
    )
    """Who sums the partial outputs of the ranks, with dispatcher standard."""
    redundant_experts: NonNegativeInt = 0
    """Physical expert slots beyond the logical experts."""
    placement: Literal["contiguous", "shuffled"] = "contiguous"
    """Which physical slot holds which expert."""
    switches: SwitchesSpec = SwitchesSpec()
    """Environment switches that change semantics."""
    strict_shapes: bool = False
    """Refuse sizes that the real kernels refuse, although this run emulates them."""

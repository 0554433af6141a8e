"""The closed vocabularies of the pipeline: stages, formats, recipes. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Stage(StrEnum):
    """The public stages of one MoE layer, in the order a token passes them."""

    WEIGHTS = "weights"
    GLUE_IN = "glue_in"
    ROUTE = "route"
    DISPATCH = "dispatch"
    PRE_PERMUTE = "pre_permute"
    GEMM1 = "gemm1"
    ACTIVATION = "activation"
    GEMM2 = "gemm2"
    POST_PERMUTE = "post_permute"
    COMBINE = "combine"
    TAIL = "tail"
    GLUE_OUT = "glue_out"

    @property
    def position(self) -> int:
        """0 for ``weights`` up to 11 for ``glue_out``."""
        return _POSITIONS[self]


_POSITIONS: Final[Mapping[Stage, int]] = MappingProxyType(
    {stage: position for position, stage in enumerate(Stage)}
)


class DispatchFormat(StrEnum):
    """How tokens travel from the rank that owns them to the ranks that own their experts."""

    STANDARD = "standard"
    FLASHINFER = "flashinfer"
    DEEPEP_NORMAL = "deepep_normal"
    DEEPEP_LL = "deepep_ll"
    DEEPEP_V2 = "deepep_v2"
    MOONCAKE = "mooncake"
    NIXL = "nixl"

    @property
    def folds_scaling_factor(self) -> bool:
        """Whether the routed scaling factor belongs to the weighted sum, not to the tail."""
        return self in (DispatchFormat.STANDARD, DispatchFormat.FLASHINFER)

    @property
    def is_low_latency(self) -> bool:
        """Whether it hands over one slab an expert and leaves the weights to combine."""
        return self in (DispatchFormat.DEEPEP_LL, DispatchFormat.MOONCAKE, DispatchFormat.NIXL)


class GemmLayout(StrEnum):
    """How rows lie in front of a grouped GEMM: one slab an expert, or segments end to end."""

    MASKED = "masked"
    CONTIG = "compact"


class SharedExpertMode(StrEnum):
    """Where the shared expert is computed and added."""

    TP_SHARDED = "tp_sharded"
    REPLICATED = "replicated"
    LOCAL = "local"


class RunnerBackend(StrEnum):
    """Who computes the grouped GEMMs; decides which permute runs."""

    DEEP_GEMM = "deep_gemm"


class QuantRecipe(StrEnum):
    """Number formats of weights and activations."""

    BF16 = "bf16"
    FP8_BLOCK128 = "fp8_block128"
    FP8_PER_TENSOR = "fp8_per_tensor"
    MXFP8 = "mxfp8"
    MXFP4_W4A8 = "mxfp4_w4a8"
    MXFP4_AS_FP8 = "mxfp4_as_fp8"


class ActivationKind(StrEnum):
    """The gated function between the two GEMMs of an expert."""

    SILU = "silu"
    OAI_SWIGLU = "oai_swiglu"
    SITU = "situ"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedActivation:
    """What an expert does with gate ``g`` and up ``u``.

    silu        ``g * sigmoid(g) * u``; with a limit L, g is at most L and u within +-L
    oai_swiglu  ``g * sigmoid(alpha * g) * (u + 1)``, clamped by its limit in the same way
    situ        ``alpha * tanh(g / alpha) * sigmoid(g) * c * tanh(u / c)``, c = ``linear_limit``

    Attributes:
        kind: which of them.
        limit: swiglu_limit of silu, gemm1_clamp_limit of oai_swiglu; None: no clamp.
        alpha: gemm1_alpha of oai_swiglu; beta of situ.
        linear_limit: linear beta of situ.
        keeps_fp32: silu's product goes to the quantiser without a store in between.

    Source: SGLang 0.5.21, moe_runner/base.py::MoeRunnerConfig; moe_runner/deep_gemm.py.
    """

    kind: ActivationKind = ActivationKind.SILU
    limit: float | None = None
    alpha: float | None = None
    linear_limit: float | None = None
    keeps_fp32: bool = False

    def __post_init__(self) -> None:
        needs_alpha = self.kind is not ActivationKind.SILU
        if needs_alpha != (self.alpha is not None):
            raise ValueError(f"{self.kind} {'needs' if needs_alpha else 'has no'} alpha")
        if (self.kind is ActivationKind.SITU) != (self.linear_limit is not None):
            raise ValueError(f"linear_limit belongs to situ alone, this is {self.kind}")
        if self.kind is ActivationKind.SITU and self.limit is not None:
            raise ValueError("situ saturates by itself; it has no limit")
        if self.keeps_fp32 and needs_alpha:
            raise ValueError(f"keeps_fp32 belongs to silu alone, this is {self.kind}")


class ScaleFormat(StrEnum):
    """How the scale of a quantised group is stored."""

    NONE = "none"
    FP32 = "fp32"
    UE8M0 = "ue8m0"


class Platform(StrEnum):
    """Whose rules hold: Hopper, datacentre Blackwell, workstation Blackwell."""

    SM90 = "sm90"
    SM100 = "sm100"
    SM120 = "sm120"


class Phase(StrEnum):
    """Prefill (extend) or decode."""

    EXTEND = "extend"
    DECODE = "decode"


class ScoringFunc(StrEnum):
    """How router logits become scores; names as in the models' config.json."""

    SQRTSOFTPLUS = "sqrtsoftplus"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


COMBINED_TOP_K: Final = (1, 2, 4, 6, 8)
"""Top-k sizes whose slots FlashInfer's combine adds as a tree of neighbours; kept here."""

OTHER_COMBINED_TOP_K: Final = (10, 12, 14, 16, 18, 22)
"""Top-k sizes that it adds as well, in orders that are not modelled."""

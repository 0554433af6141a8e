"""The closed vocabularies of the pipeline: stages, formats, recipes. No torch here."""

from collections.abc import Mapping
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

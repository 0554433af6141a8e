"""What each family's published modelling code does where its config.json is silent or misleads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from moe.formats import ActivationKind

ACTIVATIONS: Final[Mapping[str, ActivationKind]] = MappingProxyType(
    {
        "silu": ActivationKind.SILU,
        "swigluoai": ActivationKind.OAI_SWIGLU,
        "situ": ActivationKind.SITU,
    }
)
"""``hidden_act`` of a config.json -> what its experts compute between their GEMMs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One ``model_type``.

    Attributes:
        implies: our field name -> the value that a silent config.json stands for.
        silu_means: what its experts compute where ``hidden_act`` is ``silu``.
        pads_to: hidden and intermediate size grow to a multiple of it under mxfp4 recipes.
        has_biases: its router and its experts add biases to their products.
        deepseek_v41: its sqrtsoftplus is linear above 20, and a NaN ranks first.
        other_formula: what keeps it from being a MoE layer as modelled here, if anything does.
    """

    implies: Mapping[str, object] = field(default_factory=dict)
    silu_means: ActivationKind = ActivationKind.SILU
    pads_to: int | None = None
    has_biases: bool = False
    deepseek_v41: bool = False
    other_formula: str | None = None

    def activation_kind(self, hidden_act: str) -> ActivationKind | None:
        """What the experts compute; None where it is none of ours."""
        return self.silu_means if hidden_act == "silu" else ACTIVATIONS.get(hidden_act)


_RANKS_WITH_BIAS: Final = {
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "correction_bias": True,
}
_MINIMAX_M3: Final = Family(implies=_RANKS_WITH_BIAS, silu_means=ActivationKind.OAI_SWIGLU)
_DEEPSEEK_V4: Final = {
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "correction_bias": True,
    "num_hash_layers": 3,
}
_LLAMA4: Final = Family(other_formula="it scales the expert's input, not its output")
_SOFTMAX: Final = {"scoring_func": "softmax", "norm_topk_prob": True}
_PLAIN_SOFTMAX: Final = {"scoring_func": "softmax", "norm_topk_prob": False}

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "deepseek_v2": Family(implies=_PLAIN_SOFTMAX),
        "deepseek_v3": Family(implies=_RANKS_WITH_BIAS),
        "deepseek_v4": Family(implies=_DEEPSEEK_V4),
        "deepseek_v41": Family(implies=_DEEPSEEK_V4, deepseek_v41=True),
        "glm4_moe": Family(implies=_RANKS_WITH_BIAS),
        # A softmax over the chosen logits is a softmax over all of them, renormalised.
        "gpt_oss": Family(
            implies=_SOFTMAX,
            silu_means=ActivationKind.OAI_SWIGLU,
            pads_to=256,
            has_biases=True,
        ),
        "kimi_k2": Family(implies=_RANKS_WITH_BIAS),
        "kimi_linear": Family(implies=_RANKS_WITH_BIAS),
        "llama4": _LLAMA4,
        "llama4_text": _LLAMA4,
        "minimax_m2": Family(implies=_RANKS_WITH_BIAS),
        # One file: the published text_config, and what transformers makes of it.
        "minimax_m3": _MINIMAX_M3,
        "minimax_m3_vl_text": _MINIMAX_M3,
        "mixtral": Family(implies=_SOFTMAX),
        "qwen2_moe": Family(implies=_PLAIN_SOFTMAX | {"shared_expert_gate": True}),
        "qwen3_moe": Family(implies=_PLAIN_SOFTMAX),
        "qwen3_next": Family(implies=_SOFTMAX | {"shared_expert_gate": True}),
    }
)
"""``model_type`` -> its row.

Source: transformers 5, models/<family>/configuration_<family>.py and modeling_<family>.py;
SGLang 0.5.21, quantization/mxfp4.py::Mxfp4MoEMethod.create_weights (``pads_to``).
"""

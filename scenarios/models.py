"""The sizes and rules of one MoE layer, read from a published config.json as it stands."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from moe.formats import ActivationKind, GatedActivation, ScoringFunc
from scenarios.errors import not_one_of, shown
from scenarios.families import FAMILIES, Family

T = TypeVar("T")

FP32_TINY: Final = 2.0**-126
FP32_LARGEST: Final = 2.0**128 * (1 - 2.0**-24)
"""Kernels keep every constant of a model in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeModel:
    """One MoE layer's sizes and rules, in plain values.

    ``hidden_size`` is the width in which the routed experts work; in a latent MoE the model's own
    is ``outer_hidden_size``, and shared experts, which work in that one, are left out.
    ``shared_intermediate_size`` is the width of all shared experts together; 0 when there are none.
    ``correction_bias`` says whether the router ranks by score + bias (the weights stay bias-free).
    ``hidden_act`` is the published name; ``activation`` is what it stands for, and stands in for a
    name that does not run.
    ``pads_to``: under mxfp4 recipes hidden and intermediate size are padded to a multiple of it.
    ``has_biases``: the published router and experts add biases, which are left out.
    ``deepseek_v41`` is V4.1's form of sqrtsoftplus: linear above 20, and a NaN ranks first.
    """

    name: str
    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    shared_intermediate_size: int
    shared_expert_gate: bool
    scoring_func: ScoringFunc
    norm_topk_prob: bool
    routed_scaling_factor: float
    activation: GatedActivation
    correction_bias: bool
    n_group: int
    topk_group: int
    num_hash_layers: int
    vocab_size: int
    hidden_act: str
    outer_hidden_size: int | None = None
    pads_to: int | None = None
    has_biases: bool = False
    deepseek_v41: bool = False

    @property
    def swiglu_limit(self) -> float | None:
        """The clamp of a silu; None where there is none, or another activation."""
        is_silu = self.activation.kind is ActivationKind.SILU
        return self.activation.limit if is_silu else None


class ModelError(ValueError):
    """A model description that names no MoE layer we know; ``faults`` are (key, message) pairs."""

    def __init__(self, faults: tuple[tuple[str, str], ...]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        return "; ".join(f"{key}: {message}" if key else message for key, message in self.faults)


# Our name -> the names that published configs use, the first one present counts.
# `intermediate_size` is the expert width only where no `moe_intermediate_size` stands.
CONFIG_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "hidden_size": ("hidden_size",),
    "routed_expert_hidden_size": ("routed_expert_hidden_size",),
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "n_routed_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_top_k",
        "moe_topk",
        "moe_k",
    ),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_intermediate_size": ("shared_intermediate_size", "shared_expert_intermediate_size"),
    "shared_expert_gate": ("shared_expert_gate",),
    "scoring_func": ("scoring_func", "moe_router_activation_func"),
    "norm_topk_prob": ("norm_topk_prob", "moe_renormalize"),
    "routed_scaling_factor": ("routed_scaling_factor",),
    "swiglu_limit": ("swiglu_limit",),
    "swiglu_alpha": ("swiglu_alpha",),
    "activation_situ_beta": ("activation_situ_beta",),
    "activation_situ_linear_beta": ("activation_situ_linear_beta",),
    "correction_bias": ("correction_bias", "use_routing_bias", "topk_method"),
    "n_group": ("n_group", "num_expert_group"),
    "topk_group": ("topk_group",),
    "num_hash_layers": ("num_hash_layers",),
    "vocab_size": ("vocab_size",),
    "hidden_act": ("hidden_act",),
}

OAI_ALPHA: Final = 1.702
"""Gain of oai_swiglu's sigmoid where a config.json does not say: transformers GptOssConfig."""

_LANGUAGE_SECTIONS: Final = ("text_config", "language_config", "llm_config")


def moe_section(config: Mapping[str, object]) -> Mapping[str, object]:
    """The part of a config.json that describes the MoE layers.

    Multimodal configs nest it (``text_config`` and its like); plain ones are their own.

    Raises:
        ModelError: nothing in it counts experts.
    """
    experts = CONFIG_NAMES["n_routed_experts"]
    nested = (config.get(name) for name in _LANGUAGE_SECTIONS)
    for section in (config, *nested):
        if isinstance(section, Mapping) and any(section.get(k) is not None for k in experts):
            return section
    raise ModelError((("", f"no MoE: none of {', '.join(experts)}"),))


def model_from_config(config: Mapping[str, object], *, name: str | None = None) -> MoeModel:
    """The MoE layer that a published config.json describes.

    Args:
        config: the parsed file, unmodified.
        name: what to call the model; its ``model_type`` when left out.

    Raises:
        ModelError: no MoE, a missing or ill-typed value, or a formula other than
            ``shared(x) + scale * sum_k w_k * expert_k(x)``; every fault at once.
    """
    section = moe_section(config)
    model_type = str(section.get("model_type", ""))
    family = FAMILIES.get(model_type, Family())
    if family.other_formula is not None:
        reason = f"{model_type!r} computes another formula: {family.other_formula}"
        raise ModelError((("model_type", reason),))
    reader = _ConfigReader(section, family.implies)
    model = _build(reader, name or model_type or "unnamed", family)
    if reader.faults:
        raise ModelError(tuple(reader.faults))
    return model


def _build(reader: "_ConfigReader", name: str, family: Family) -> MoeModel:
    hidden_size = reader.whole("hidden_size")
    latent_size = reader.latent_size(hidden_size)
    intermediate = reader.whole("moe_intermediate_size")
    num_shared, shared_width = (0, 0) if latent_size else _shared_experts(reader, intermediate)
    hidden_act = reader.text("hidden_act", default="silu")
    return MoeModel(
        name=name,
        hidden_size=latent_size or hidden_size,
        moe_intermediate_size=intermediate,
        n_routed_experts=reader.whole("n_routed_experts"),
        num_experts_per_tok=reader.whole("num_experts_per_tok"),
        n_shared_experts=num_shared,
        shared_intermediate_size=shared_width,
        shared_expert_gate=num_shared > 0 and reader.flag("shared_expert_gate", default=False),
        scoring_func=reader.scoring_func(),
        norm_topk_prob=reader.flag("norm_topk_prob"),
        routed_scaling_factor=reader.real("routed_scaling_factor", default=1.0),
        activation=_activation(reader, family.activation_kind(hidden_act)),
        correction_bias=reader.correction_bias(),
        n_group=reader.whole("n_group", default=1),
        topk_group=reader.whole("topk_group", default=1),
        num_hash_layers=reader.whole("num_hash_layers", default=0, minimum=0),
        vocab_size=reader.whole("vocab_size"),
        hidden_act=hidden_act,
        outer_hidden_size=hidden_size if latent_size else None,
        pads_to=family.pads_to,
        has_biases=family.has_biases,
        deepseek_v41=family.deepseek_v41,
    )


def _shared_experts(reader: "_ConfigReader", intermediate: int) -> tuple[int, int]:
    """How many there are, and the width of all together."""
    width = reader.whole("shared_intermediate_size", default=0, minimum=0)
    count = reader.whole("n_shared_experts", default=int(width > 0), minimum=0)
    return count, (width or count * intermediate) if count else 0


def _activation(reader: "_ConfigReader", kind: ActivationKind | None) -> GatedActivation:
    """The gated function with its parameters; a silu stands in where there is none."""
    match kind:
        case ActivationKind.OAI_SWIGLU:
            return GatedActivation(
                kind=kind,
                alpha=reader.real("swiglu_alpha", default=OAI_ALPHA),
                limit=reader.optional_real("swiglu_limit"),
            )
        case ActivationKind.SITU:
            return GatedActivation(
                kind=kind,
                alpha=reader.real("activation_situ_beta"),
                linear_limit=reader.real("activation_situ_linear_beta"),
            )
        case ActivationKind.SILU | None:
            return GatedActivation(limit=reader.optional_real("swiglu_limit"))


class _ConfigReader:
    """Typed access to one config; a bad value becomes a fault and a stand-in, so all are found."""

    def __init__(self, config: Mapping[str, object], family: Mapping[str, object]) -> None:
        self._config = config
        self._family = family
        self.faults: list[tuple[str, str]] = []

    def whole(self, field: str, *, default: int | None = None, minimum: int = 1) -> int:
        key, value = self._find(field, default)
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        return self._fault(key, value, f"a whole number >= {minimum}", minimum)

    def latent_size(self, hidden_size: int) -> int | None:
        """Width in which routed experts work, where it is not the model's own."""
        key, value = self._find("routed_expert_hidden_size", None)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= hidden_size:
            return value
        return self._fault(key, value, f"a width within hidden_size({hidden_size})", None)

    def real(self, field: str, *, default: float | None = None) -> float:
        key, value = self._find(field, default)
        number = value if isinstance(value, int | float) else math.nan
        if FP32_TINY <= number <= FP32_LARGEST and not isinstance(value, bool):
            return float(number)
        return self._fault(key, value, "a number > 0 that fp32 holds", 1.0)

    def optional_real(self, field: str) -> float | None:
        if self._find(field, None)[1] is None:
            return None
        return self.real(field)

    def flag(self, field: str, *, default: bool | None = None) -> bool:
        key, value = self._find(field, default)
        return value if isinstance(value, bool) else self._fault(key, value, "true or false", False)

    def text(self, field: str, *, default: str) -> str:
        key, value = self._find(field, default)
        return value if isinstance(value, str) else self._fault(key, value, "text", default)

    def scoring_func(self) -> ScoringFunc:
        key, value = self._find("scoring_func", None)
        known = [str(function) for function in ScoringFunc]
        if value in known:
            return ScoringFunc(str(value))
        if value is not None:
            self.faults.append((key, not_one_of(value, known)))
            return ScoringFunc.SOFTMAX
        return self._fault(key, value, f"one of {', '.join(known)}", ScoringFunc.SOFTMAX)

    def correction_bias(self) -> bool:
        """A flag, or DeepSeek's ``topk_method``, of which ``noaux_tc`` alone has the bias."""
        key, value = self._find("correction_bias", False)
        if key == "topk_method" and isinstance(value, str):
            return value == "noaux_tc"
        return self.flag("correction_bias", default=False)

    def _find(self, field: str, default: object) -> tuple[str, object]:
        for key in CONFIG_NAMES[field]:
            if self._config.get(key) is not None:
                return key, self._config[key]
        return field, self._family.get(field, default)

    def _fault(self, key: str, value: object, wanted: str, stand_in: T) -> T:
        if value is None:
            self.faults.append((key, f"missing, and not implied by model_type; wanted {wanted}"))
        else:
            self.faults.append((key, f"{shown(value)} was read; wanted {wanted}"))
        return stand_in

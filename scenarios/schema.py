"""A scenario as types: one frozen model a section; sections.py has those of the layer itself."""

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from moe.formats import Phase, Platform, Stage
from scenarios.sections import (
    AttentionParallel,
    ModelSpec,
    MoeParallel,
    MoeSpec,
    ParallelSpec,
    Spec,
    SwitchesSpec,
    WeightsSpec,
)

__all__ = [
    "AttentionParallel",
    "BackendsSpec",
    "BatchSpec",
    "Expectation",
    "InputsSpec",
    "ModelSpec",
    "MoeParallel",
    "MoeSpec",
    "ParallelSpec",
    "RoutingSpec",
    "RunSpec",
    "Scenario",
    "Spec",
    "SwitchesSpec",
    "WeightsSpec",
]

LARGEST_SEED: Final = (1 << 48) - 1
"""Twins and tensors have seeds of their own that are made of it."""

MOST_TOKENS: Final = 1 << 20
"""Of one attention-DP group; far more than a forward of one layer holds."""

Mode = Literal["exact", "random", "file"]

LONGEST_NAME: Final = 100

_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._+-]{{0,{LONGEST_NAME - 1}}}")
_IMPORT_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_BACKENDS: Final = {
    "gemm": ("auto", "torch", "deep_gemm"),
    "transport": ("auto", "loopback", "gloo", "nccl", "deep_ep"),
    "kernels": ("auto", "torch", "triton"),
}


def checked_name(value: str) -> str:
    """The name itself, or a ValueError that says what a name is made of."""
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value[:40]!r} is no name: up to {LONGEST_NAME} letters, digits, '.', '_', '+' and "
            "'-', the first a letter or digit"
        )
    return value


class RoutingSpec(Spec):
    """Which experts the tokens go to."""

    kind: Literal[
        "router",
        "balanced",
        "zipf",
        "hot_expert",
        "one_rank",
        "dropped",
        "ties",
        "all_negative",
    ] = "router"
    """The layer's own router, or a made distribution."""
    weights: Literal["auto", "router", "pinned"] = "auto"
    """Top-k weights from the router, or fixed ones."""


class BatchSpec(Spec):
    """The tokens of one forward."""

    phase: Phase
    """Prefill (extend) or decode."""
    tokens: tuple[Annotated[int, Field(ge=0, le=MOST_TOKENS)], ...] = Field(min_length=1)
    """One count per attention-DP group; 0 is an idle group. With cp a group's are split."""
    padding: Literal["auto", "sum_len", "max_len"] = "auto"
    """How DP slots are padded; auto is SGLang's rule."""
    routing: RoutingSpec = RoutingSpec()
    """Which experts the tokens go to."""


class InputsSpec(Spec):
    """What the tokens hold."""

    modes: tuple[Mode, ...] = Field(min_length=1)
    """exact: sums without rounding; random: the judged band; file: captured elsewhere."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Of every random draw; required unless every mode is file."""
    path: str | None = None
    """With mode file: safetensors with hidden_states [T,H]; relative to this file."""

    @model_validator(mode="after")
    def _modes_have_what_they_need(self) -> Self:
        if len(set(self.modes)) != len(self.modes):
            raise ValueError(f"modes names one twice: {', '.join(self.modes)}")
        if "seed" not in self.model_fields_set and set(self.modes) != {"file"}:
            raise ValueError("seed is required unless every mode is 'file'")
        if ("file" in self.modes) != (self.path is not None):
            raise ValueError("path and mode 'file' go together: give both or neither")
        return self


class BackendsSpec(Spec):
    """Who computes and moves; each also takes `package.module:Class`."""

    gemm: str = "auto"
    """auto, torch, deep_gemm, or package.module:Class, a GEMM of your own."""
    transport: str = "auto"
    """auto, loopback, gloo, nccl, deep_ep."""
    kernels: str = "auto"
    """auto, torch, triton."""

    @field_validator("gemm", "transport", "kernels")
    @classmethod
    def _known_or_importable(cls, value: str, info: ValidationInfo) -> str:
        known = _BACKENDS[str(info.field_name)]
        if value in known or _IMPORT_PATH.fullmatch(value):
            return value
        raise ValueError(f"{value!r} is not one of {', '.join(known)} or package.module:Class")


class RunSpec(Spec):
    """How the ranks are started; none of it may change a number."""

    runtime: Literal["ray", "loopback"] = "ray"
    """An actor a rank, or every rank in this process, one running at a time."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda only where enough GPUs of the platform are there."""
    rounds: PositiveInt = 1
    """Forwards on the same buffers, the token list rotated between them."""
    timeout_s: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Seconds until a silent rank counts as hung."""
    backends: BackendsSpec = BackendsSpec()
    """Who computes and moves."""


class Expectation(Spec):
    """The verdict this scenario is there to get; a bare word is its verdict."""

    verdict: Literal["agree", "discrepancy", "failed", "unsupported"] = "agree"
    """The verdict."""
    stage: Stage | None = None
    """With discrepancy: the stage that diverges first; required."""
    fault: str | None = None
    """With discrepancy: the fault that the diagnosis must name."""
    mode: Mode | None = None
    """With discrepancy: the mode that must show it; null is any."""

    @model_validator(mode="before")
    @classmethod
    def _a_bare_word_is_the_verdict(cls, value: object) -> object:
        return {"verdict": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _a_discrepancy_has_a_stage(self) -> Self:
        if self.verdict == "discrepancy" and self.stage is None:
            raise ValueError("discrepancy needs its stage: {verdict: discrepancy, stage: STAGE}")
        details = (self.stage, self.fault, self.mode)
        if self.verdict != "discrepancy" and details != (None, None, None):
            raise ValueError("stage, fault and mode belong to verdict discrepancy")
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        bare = {"enum": ["agree", "failed", "unsupported"], "type": "string"}
        return {"anyOf": [bare, handler(schema)]}


class Scenario(Spec):
    """One forward of one MoE layer on one topology, and the verdict expected of it."""

    name: str
    """Letters, digits, '.', '_', '+' and '-'; results are filed under it."""
    about: str = ""
    """One line for readers."""
    model: ModelSpec
    """Whose MoE layer runs."""
    parallel: ParallelSpec
    """How the ranks are used."""
    moe: MoeSpec
    """The choices inside the MoE layer."""
    platform: Platform
    """Whose rules hold, on whatever machine the scenario runs."""
    batch: BatchSpec
    """The tokens of one forward."""
    inputs: InputsSpec
    """What the tokens hold."""
    run: RunSpec = RunSpec()
    """How the ranks are started."""
    inject: tuple[str, ...] = ()
    """Faults, each FAULT[:param=value,...]."""
    compare: Literal["lattice"] | None = None
    """Compare with the neighbouring topologies as well."""
    allow_unsupported: bool = False
    """Run what a server refuses although it has a meaning, and sizes that a kernel refuses."""
    expect: Expectation = Expectation()
    """The verdict expected: agree, failed, unsupported, or a discrepancy with its stage."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        return checked_name(value)

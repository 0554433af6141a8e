"""The table of named faults: one row a way to be wrong, with the public bug it stands for."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from moe.faults import collectives, values
from moe.faults.kinds import Fault, FaultKind, Parameter
from moe.formats import Stage


def _scaling_factor_twice(plan: Any, params: Mapping[str, Parameter]) -> Any:  # noqa: ANN401
    return replace(plan, routed_scaling_factor=plan.routed_scaling_factor**2)


def _blinded(params: Mapping[str, Parameter]) -> tuple[str, ...]:
    return (str(params["check"]),)


def _value(
    stage: Stage, act: Callable[..., Any], about: str, origin: str, **params: Parameter
) -> Fault:
    return Fault(
        name=act.__name__,
        kind=FaultKind.VALUE,
        stage=stage,
        about=about,
        origin=origin,
        params={"rank": "auto", **params},
        act=act,
    )


def _failure(act: Callable[..., Any], about: str, *, needs_process: bool) -> Fault:
    return Fault(
        name=act.__name__,
        kind=FaultKind.VALUE,
        stage=Stage.GEMM1,
        about=about,
        origin="infrastructure",
        params={"rank": "auto", "stage": "gemm1"},
        act=act,
        needs_process=needs_process,
    )


_ROWS = (
    _value(
        Stage.WEIGHTS,
        values.gate_up_swapped,
        "up rows loaded in front of the gate rows",
        "sgl-project/sglang#32430",
    ),
    _value(
        Stage.ROUTE,
        values.weights_from_biased_scores,
        "mixing weights taken from score + bias",
        "huggingface/transformers#41647",
    ),
    _value(
        Stage.DISPATCH,
        values.tokens_swapped,
        "two received tokens exchanged, ids and weights not",
        "deepseek-ai/DeepEP#621",
        row=0,
    ),
    _value(
        Stage.DISPATCH,
        values.local_ids_left_global,
        "received expert ids not made local",
        "vllm-project/vllm-gaudi#1796",
    ),
    _value(
        Stage.DISPATCH,
        values.count_off_by_one,
        "one expert's announced rows one too many",
        "deepseek-ai/DeepEP#427",
        expert=0,
    ),
    _value(
        Stage.PRE_PERMUTE,
        values.padding_row_counted,
        "a slot without a local route reads a padding row",
        "vllm-project/vllm#46408",
        row=0,
    ),
    _value(
        Stage.ACTIVATION,
        values.scale_rounded_down,
        "activation scales of one row rounded down after quantising",
        "deepseek-ai/DeepGEMM#337",
        row=0,
    ),
    _value(
        Stage.POST_PERMUTE,
        values.topk_weights_twice,
        "top-k weights folded in twice",
        "vllm-project/vllm#45037",
    ),
    Fault(
        name="partial_dropped",
        kind=FaultKind.COLLECTIVE,
        stage=Stage.COMBINE,
        about="one rank's partial of one token lost on the way back",
        origin="kvcache-ai/Mooncake@1db7604a4",
        params={"rank": "auto", "row": 0},
        act=collectives.partial_dropped,
    ),
    Fault(
        name="combine_skipped",
        kind=FaultKind.COLLECTIVE,
        stage=Stage.COMBINE,
        about="one rank does not enter the combine",
        origin="vllm-project/vllm#51984",
        params={"rank": "auto"},
        act=collectives.combine_skipped,
    ),
    Fault(
        name="scaling_factor_twice",
        kind=FaultKind.PLAN,
        stage=Stage.TAIL,
        about="routed_scaling_factor applied a second time",
        origin="vllm-project/vllm#45037",
        params={"rank": "all"},
        act=_scaling_factor_twice,
    ),
    _value(
        Stage.TAIL,
        values.shared_expert_per_rank,
        "the replicated shared expert counted once a rank",
        "sgl-project/sglang#26845",
    ),
    _failure(values.rank_raises, "an exception in the middle of a stage", needs_process=False),
    _failure(values.rank_dies, "the rank's process is killed", needs_process=True),
    _failure(values.rank_hangs, "the rank never leaves a stage", needs_process=True),
    Fault(
        name="checker_blinded",
        kind=FaultKind.CHECKER,
        stage=Stage.GLUE_OUT,
        about="one check reports nothing; for the tests of the checks",
        origin="our own tests",
        params={"check": "band"},
        act=_blinded,
    ),
)

FAULTS: Final[Mapping[str, Fault]] = MappingProxyType({fault.name: fault for fault in _ROWS})

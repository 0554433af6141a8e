"""Faults of what judges: a check that reports nothing, a golden model of another recipe."""

from dataclasses import replace
from typing import Final

from moe.faults.kinds import Fault, FaultKind, Judged, Params
from moe.formats import ScaleFormat, Stage


def checker_blinded(params: Params) -> tuple[str, ...]:
    """The check of that name."""
    return (str(params["check"]),)


def golden_of_other_scales(judged: Judged, params: Params) -> Judged:
    """A golden with fp32 scales where the layer rounds them to powers of two."""
    if judged.scale_format is not ScaleFormat.UE8M0:
        return judged
    return replace(judged, scale_format=ScaleFormat.FP32)


def golden_without_clamp(judged: Judged, params: Params) -> Judged:
    """A golden whose activation clamps nothing, as an unquantised reference model may."""
    if judged.activation.limit is None:
        return judged
    return replace(judged, activation=replace(judged.activation, limit=None))


CHECKER_FAULTS: Final = (
    Fault(
        name="checker_blinded",
        kind=FaultKind.CHECKER,
        stage=Stage.GLUE_OUT,
        about="one check reports nothing; for the tests of the checks",
        origin="our own tests",
        params={"check": "band"},
        act=checker_blinded,
    ),
    Fault(
        name="golden_of_other_scales",
        kind=FaultKind.GOLDEN,
        stage=Stage.WEIGHTS,
        about="a golden with fp32 scales judges a layer with powers of two",
        origin="deepseek-ai/DeepGEMM#112",
        params={},
        act=golden_of_other_scales,
    ),
    Fault(
        name="golden_without_clamp",
        kind=FaultKind.GOLDEN,
        stage=Stage.ACTIVATION,
        about="a golden without the clamp on gate and up judges a layer that has one",
        origin="our own reading of reference models that leave the clamp out",
        params={},
        act=golden_without_clamp,
    ),
)

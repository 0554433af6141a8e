"""Clean runs of every recipe's scales, and what their contracts say of a spoiled one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from moe.formats import Stage
from moe.quant.ue8m0 import mn_major, row_major
from moe.trace import RankTrace
from reports.verdict.deviation import Deviation
from reports.verdict.ledger import Ledger
from reports.verdict.scale_contracts import check_scales
from reports.verdict.subject import Subject
from tests.verdict.clean_runs import CleanRun, run_clean

SIZES = ("model.overrides.num_experts_per_tok=2", "model.overrides.moe_intermediate_size=256")
"""Both widths are 256: eight groups of 32 in two words, two of 128 in one, which has two spare
bytes."""

SLABS = ("moe.dispatcher=deepep_ll", "batch.phase=decode")
RUNS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("moe.recipe=bf16",),
    "fp32": ("platform=sm90",),
    "ue8m0": ("platform=sm100",),
    "per tensor": ("platform=sm90", "moe.recipe=fp8_per_tensor"),
    "mxfp8": ("platform=sm100", "moe.recipe=mxfp8"),
    "mxfp4": ("platform=sm100", "moe.recipe=mxfp4_w4a8"),
    "mxfp4 as fp8": ("platform=sm90", "moe.recipe=mxfp4_as_fp8"),
    "slabs": ("platform=sm90", *SLABS),
    "slabs, bf16 wire": ("platform=sm90", *SLABS, "moe.switches.deepep_bf16_dispatch=true"),
    "slabs ue8m0": ("platform=sm100", *SLABS),
    "slabs sm120": ("platform=sm120", *SLABS, "allow_unsupported=true"),
}
PACKED = ("ue8m0", "mxfp8", "mxfp4")
BLOCKS = ("fp32", "per tensor", "mxfp4 as fp8")
RANK = 1
"""The rank that is spoiled."""

Place = tuple[Stage, str]
"""A stage, and its tensor of codes; of stage ``weights``, a matrix."""


@cache
def scale_run(name: str) -> CleanRun:
    """Two ranks, two experts a token; made once a name."""
    return run_clean(*SIZES, *RUNS[name])


def keys_of(place: Place) -> tuple[str, str]:
    """Names in the trace of what a place holds: codes or plain values, and their scales."""
    stage, name = place
    if stage is Stage.WEIGHTS:
        return f"{name}.values", f"{name}.scale"
    return name, f"{name}_scale"


def values_of(run: CleanRun, place: Place) -> Tensor:
    return run.tensor(place[0], RANK, keys_of(place)[0])


def scale_of(run: CleanRun, place: Place) -> Tensor:
    return run.tensor(place[0], RANK, keys_of(place)[1])


def deviations(run: CleanRun, traces: Sequence[RankTrace]) -> list[Deviation]:
    """What the contracts of scales say, and no other check."""
    subject, ledger = Subject(run.resolved.judged, run.view, run.batch, traces), Ledger()
    for rank in subject.ranks:
        check_scales(subject, rank, ledger)
    return ledger.deviations


def with_scale(run: CleanRun, place: Place, scale: Tensor) -> list[Deviation]:
    """What they say once one rank has other scales there."""
    return deviations(run, run.changed(place[0], RANK, {keys_of(place)[1]: scale}))


def with_values(run: CleanRun, place: Place, values: Tensor) -> list[Deviation]:
    """The same of other values."""
    return deviations(run, run.changed(place[0], RANK, {keys_of(place)[0]: values}))


def without_scales(run: CleanRun, place: Place) -> list[Deviation]:
    """What they say where no rank has scales there."""
    stage, left_out = place[0], keys_of(place)[1]
    traces = []
    for trace in run.traces:
        left = {name: tensor for name, tensor in trace[stage].items() if name != left_out}
        traces.append(replace(trace, stages={**trace.stages, stage: left}))
    return deviations(run, traces)


def only(found: list[Deviation], place: Place) -> str:
    """The detail of the one deviation there is, on the spoiled rank at this place."""
    (one,) = found
    assert (one.check, one.stage, one.rank, one.tensor) == ("contract", place[0], RANK, place[1])
    return one.detail


def assert_row_major_is_found(name: str, place: Place) -> None:
    """Packed scales that lie row by row are one deviation, which says what is due."""
    run = scale_run(name)
    detail = only(with_scale(run, place, row_major(scale_of(run, place))), place)
    assert "; MN-major (1, " in detail


def with_byte(scale: Tensor, row: int, byte: int, value: int) -> Tensor:
    """Packed scales with one byte of one row set, rows along the fastest axis."""
    words = row_major(scale)
    words.flatten(0, -2)[row].view(torch.uint8)[byte] = value
    return mn_major(words)

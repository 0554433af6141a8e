"""Clean runs of the low-latency formats, one a wire, and whose the rows of their slabs are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.deviation import Deviation
from tests.verdict.clean_runs import FOUR_RANKS, CleanRun, run_clean

CAPACITY = 8
SLAB_ROWS = 4 * CAPACITY
SETTINGS = {
    "ue8m0": ("platform=sm100",),
    "fp32": ("platform=sm90", "moe.dispatcher=mooncake"),
    "bf16": ("moe.recipe=bf16", "moe.dispatcher=nixl"),
    "bf16 wire": ("platform=sm90", "moe.switches.deepep_bf16_dispatch=true"),
}
RANK = 3


@cache
def low_latency_run(name: str) -> CleanRun:
    """Four ranks, one of them idle; made once."""
    capacity = f"moe.switches.max_dispatch_tokens_per_rank={CAPACITY}"
    base = ("moe.dispatcher=deepep_ll", *FOUR_RANKS, "batch.tokens=[5, 0, 7, 3]", capacity)
    return run_clean(*base, *SETTINGS[name])


@dataclass(frozen=True)
class SlabRow:
    """One real row of a slab: where it is, and whose."""

    slot: int
    row: int
    source: int
    source_row: int


def slab_rows(run: CleanRun, rank: int = RANK) -> Iterator[SlabRow]:
    """Real rows of a rank, slab by slab, source by source."""
    begin, count, source_row = (
        run.tensor(Stage.DISPATCH, rank, f"handle.{part}")
        for part in ("begin", "count", "source_row")
    )
    for slot, source in (count > 0).nonzero().tolist():
        first = int(begin[slot, source])
        for row in range(first, first + int(count[slot, source])):
            yield SlabRow(slot, row, source, int(source_row[slot, row]))


def token_of(run: CleanRun, row: SlabRow) -> int:
    return run.layer_token(row.source, row.source_row)


def expert_of(run: CleanRun, slot: int, rank: int = RANK) -> int:
    return run.resolved.judged.local_experts(rank)[slot]


def found(run: CleanRun, stage: Stage, rank: int = RANK, **tensors: Tensor) -> Sequence[Deviation]:
    """Deviations once tensors are replaced; dots of their names are written as two underscores."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return run.judged(run.changed(stage, rank, named)).deviations


def copy_of(tensor: Tensor) -> Tensor:
    """In the same memory layout."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def bumped(tensor: Tensor, at: tuple[int, ...]) -> Tensor:
    """A copy with one cell of a row changed: its largest value, by more than declared noise."""
    copy = copy_of(tensor)
    cells = copy[at]
    if not cells.is_floating_point():
        cells[0] += 1
    else:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cells.element_size()]
        cells.view(bits)[int(cells.float().abs().argmax())] -= {1: 1, 2: 2, 4: 4}[
            cells.element_size()
        ]
    return copy

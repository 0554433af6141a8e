"""One traced tensor changed in one cell, by as little as its check has to see."""

from itertools import combinations

import torch
from torch import Tensor

from moe.formats import Stage
from tests.verdict.clean_runs import CleanRun
from topology.sync import PADDING

PLACES = {
    (Stage.ROUTE, "logits"): 2**15,
    (Stage.ROUTE, "topk_weights"): 2**10,
    (Stage.ACTIVATION, "activation"): 64,
}
"""Last places of fp32 that exceed the declared noise; 4 do in any other fp32 tensor."""

COUNTS = {"rows.masked_m", "rows.live_rows", "num_recv_tokens_per_expert"}
OF_GROUPED_ROWS = {Stage.GEMM1, Stage.ACTIVATION, Stage.GEMM2}
OF_LAYER_ROWS = {"physical_ids", "wire", "wire_scale"}
"""Tensors of dispatch that are not of received rows."""

OF_OWN_ROWS = {"own", "wire", "wire_scale"}
"""Tensors of glue_in that are not of layer rows."""


def rank_that_matters(run: CleanRun, stage: Stage, name: str) -> int:
    """The last rank on which a token stands in the tensor."""
    return max(
        rank
        for rank, trace in enumerate(run.traces)
        if name in trace[stage] and row_that_matters(run, stage, rank, name) is not None
    )


def row_that_matters(run: CleanRun, stage: Stage, rank: int, name: str) -> int | None:
    """A row that belongs to a token, slabs laid end to end; None where there is none."""
    if stage is Stage.WEIGHTS or name in COUNTS or name.startswith("handle."):
        return 0
    if stage in OF_GROUPED_ROWS or name.startswith("rows."):
        return run.route(rank).row
    is_received = stage is Stage.DISPATCH and name not in OF_LAYER_ROWS
    if is_received or stage in (Stage.PRE_PERMUTE, Stage.POST_PERMUTE):
        return run.route(rank).received
    sync = run.resolved.judged.sync
    is_own = stage is Stage.GLUE_OUT or (stage is Stage.GLUE_IN and name in OF_OWN_ROWS)
    tokens = sync.entry[rank] if is_own else sync.layer[rank]
    return next((row for row, token in enumerate(tokens) if token != PADDING), None)


def spoiled(run: CleanRun, stage: Stage, rank: int, name: str) -> Tensor:
    """A copy of the tensor, in the same memory layout, with one cell changed."""
    tensor = run.tensor(stage, rank, name)
    if name.startswith("handle."):
        return _two_sources_exchanged(run, rank, name)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    row = row_that_matters(run, stage, rank, name)
    assert row is not None
    cells = _row(copy, row)
    limit = _num_ids(run, stage, name)
    if limit is None:
        _move(cells, PLACES.get((stage, name), 4))
    else:
        slot = int((cells >= 0).nonzero()[0])
        cells[slot] = (cells[slot] + 1) % limit
    return copy


def _row(tensor: Tensor, row: int) -> Tensor:
    """[C] view of one row; the first one of a matrix of weights."""
    if tensor.dim() == 3:
        return tensor[row // tensor.shape[1], row % tensor.shape[1]]
    return tensor[row] if tensor.dim() == 2 else tensor[row : row + 1]


def _move(cells: Tensor, fp32_places: int) -> None:
    """The largest value by some last places; an integer, as packed scales are, by one."""
    at = int(cells.float().abs().argmax()) if cells.is_floating_point() else 0
    match cells.dtype:
        case torch.float8_e4m3fn:
            cells.view(torch.uint8)[at] -= 1
        case torch.bfloat16:
            cells.view(torch.int16)[at] += 2
        case torch.float32:
            cells.view(torch.int32)[at] += fp32_places
        case _:
            cells[at] += 1


def _num_ids(run: CleanRun, stage: Stage, name: str) -> int | None:
    """How many values an id may have; None for what is no id."""
    judged = run.resolved.judged
    local = judged.slots_per_rank
    if name == "input_ids":
        return int(run.tensor(Stage.WEIGHTS, 0, "tid2eid").shape[0])
    if name == "topk_ids":
        return local if stage is Stage.DISPATCH else judged.num_experts
    return {
        "restore.topk_ids": local,
        "rows.m_indices": local,
        "physical_ids": len(judged.slot_experts),
        "tid2eid": judged.num_experts,
    }.get(name)


def _two_sources_exchanged(run: CleanRun, rank: int, name: str) -> Tensor:
    """The handle with two received rows that claim each other's source."""
    (other,) = {"handle.source_rank", "handle.source_row"} - {name}
    mine, theirs = (run.tensor(Stage.DISPATCH, rank, n).tolist() for n in (name, other))
    one, two = next(
        (i, j)
        for i, j in combinations(range(len(mine)), 2)
        if theirs[i] == theirs[j] and mine[i] != mine[j]
    )
    order = torch.arange(len(mine))
    order[[one, two]] = order[[two, one]]
    return run.tensor(Stage.DISPATCH, rank, name)[order]

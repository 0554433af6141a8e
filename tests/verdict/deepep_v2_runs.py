"""Clean runs of deepep_v2's forms, and one cell of one traced tensor changed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from moe.formats import Stage
from tests.verdict.clean_runs import FOUR_RANKS, CleanRun

V2 = ("moe.dispatcher=deepep_v2", "moe.switches.max_dispatch_tokens_per_rank=16", *FOUR_RANKS)
DECODE = "batch.phase=decode"
FORMS: Mapping[str, tuple[str, ...]] = {
    "tokens": ("platform=sm100",),
    "slabs": (DECODE, "platform=sm90"),
    "in place": (DECODE, "platform=sm100", "moe.layout=compact", "allow_unsupported=true"),
    "nobody": ("moe.recipe=bf16", "batch.tokens=[0, 0, 0, 0]"),
}
"""Rank 1 is idle, or all are. Eight experts, two a rank, six a token: slots 0-5 are on 0, 1, 2."""

EXPANDED = ["slabs", "in place"]


TOKENS = [
    (Stage.DISPATCH, "wire"),
    (Stage.DISPATCH, "hidden_states"),
    (Stage.DISPATCH, "hidden_states_scale"),
    (Stage.DISPATCH, "topk_ids"),
    (Stage.DISPATCH, "topk_weights"),
    (Stage.DISPATCH, "psum"),
    (Stage.PRE_PERMUTE, "rows.hidden_states"),
    (Stage.PRE_PERMUTE, "rows.hidden_states_scale"),
    (Stage.PRE_PERMUTE, "rows.m_indices"),
    (Stage.PRE_PERMUTE, "rows.live_rows"),
    (Stage.PRE_PERMUTE, "restore.topk_ids"),
    (Stage.PRE_PERMUTE, "restore.topk_weights"),
    (Stage.POST_PERMUTE, "partial"),
    (Stage.COMBINE, "routed"),
]
ROUTES = [
    (Stage.DISPATCH, "wire"),
    (Stage.DISPATCH, "hidden_states"),
    (Stage.DISPATCH, "hidden_states_scale"),
    (Stage.DISPATCH, "topk_weights"),
    (Stage.DISPATCH, "psum"),
    (Stage.DISPATCH, "handle.source_slot"),
    (Stage.PRE_PERMUTE, "rows.hidden_states"),
    (Stage.PRE_PERMUTE, "rows.hidden_states_scale"),
    (Stage.PRE_PERMUTE, "restore.psum"),
    (Stage.PRE_PERMUTE, "restore.topk_weights"),
    (Stage.POST_PERMUTE, "partial"),
    (Stage.COMBINE, "routed"),
]
EVERY_TENSOR = [
    *(("tokens", *tensor) for tensor in TOKENS),
    *((form, *tensor) for form in EXPANDED for tensor in ROUTES),
    ("slabs", Stage.PRE_PERMUTE, "rows.masked_m"),
    ("in place", Stage.PRE_PERMUTE, "rows.m_indices"),
    ("in place", Stage.PRE_PERMUTE, "rows.live_rows"),
]
OF_LAYER_ROWS = {"wire", "routed"}
OF_SLOTS = {"psum", "restore.psum", "rows.masked_m", "rows.live_rows"}


def a_row(run: CleanRun, rank: int, name: str) -> int:
    """A row of the tensor that holds a route of a token, slabs laid end to end."""
    if name in OF_LAYER_ROWS or name in OF_SLOTS:
        return 0
    if "handle.source_slot" not in run.traces[rank][Stage.DISPATCH]:
        route = run.route(rank)
        return route.row if name.startswith("rows.") else route.received
    row, slot = first_real_row(run, rank)
    if name.startswith("rows.") and "rows.masked_m" in run.traces[rank][Stage.PRE_PERMUTE]:
        return slot * run.tensor(Stage.PRE_PERMUTE, rank, "rows.hidden_states").shape[1]
    return row


def first_real_row(run: CleanRun, rank: int) -> tuple[int, int]:
    """(expanded row, local slot) of the first route of the first slot with any."""
    start = 0
    for slot, end in enumerate(run.tensor(Stage.DISPATCH, rank, "psum").tolist()):
        if end > start:
            return start, slot
        start = -(-end // 128) * 128
    raise AssertionError(f"rank {rank} has no route")


def spoiled(run: CleanRun, stage: Stage, rank: int, name: str) -> Tensor:
    """A copy of the tensor in the same memory layout with one cell changed."""
    tensor = run.tensor(stage, rank, name)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    row = a_row(run, rank, name)
    cells = copy[row // copy.shape[1], row % copy.shape[1]] if copy.dim() == 3 else copy[row]
    cells = cells.view(-1)
    if name in ("topk_ids", "restore.topk_ids"):
        cells[cells >= 0] = 1 - cells[cells >= 0]
        return copy
    at = int(cells.float().abs().argmax())
    match copy.dtype:
        case torch.float8_e4m3fn:
            cells.view(torch.uint8)[at] -= 1
        case torch.bfloat16:
            cells.view(torch.int16)[at] += 2
        case torch.float32:
            cells.view(torch.int32)[at] += 4
        case _:
            cells[at] = (cells[at] + 1) % 6 if name == "handle.source_slot" else cells[at] + 1
    return copy


def found(run: CleanRun, stage: Stage, rank: int, tensors: Mapping[str, Tensor], check: str):
    """What one check says of a trace with tensors of one stage on one rank replaced."""
    deviations = run.judged(run.changed(stage, rank, tensors)).deviations
    return [one for one in deviations if one.check == check]

"""What each stage boundary promises: ids, dtypes, layouts, alignment, segment lengths."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import GemmLayout, Platform, Stage
from moe.golden import Stores, stores_of
from reports.verdict.captured import where_captured
from reports.verdict.layer import JudgedLayer
from reports.verdict.ledger import Ledger
from reports.verdict.rows import Rows
from reports.verdict.scale_contracts import check_scales
from reports.verdict.stage_checks import CONTRACT, broken
from reports.verdict.subject import Subject

LARGEST_BLOCK, SMALLEST_BLOCK = 128, 32
"""Rows; between them a block grows in steps of the smallest."""

STORED_AS: Final[Mapping[tuple[Stage, str], torch.dtype]] = MappingProxyType(
    {
        (Stage.WEIGHTS, "gate_weight"): torch.bfloat16,
        (Stage.WEIGHTS, "correction_bias"): torch.float32,
        (Stage.GLUE_IN, "own"): torch.bfloat16,
        (Stage.GLUE_IN, "hidden_states"): torch.bfloat16,
        (Stage.GLUE_IN, "wire"): torch.float8_e4m3fn,
        (Stage.GLUE_IN, "wire_scale"): torch.float32,
        (Stage.ROUTE, "logits"): torch.float32,
        (Stage.ROUTE, "topk_ids"): torch.int32,
        (Stage.ROUTE, "topk_weights"): torch.float32,
        (Stage.DISPATCH, "physical_ids"): torch.int32,
        (Stage.GEMM1, "gate_up"): torch.bfloat16,
        (Stage.GEMM2, "output"): torch.bfloat16,
        (Stage.POST_PERMUTE, "partial"): torch.bfloat16,
        (Stage.COMBINE, "routed"): torch.bfloat16,
        (Stage.TAIL, "shared.gate_up"): torch.bfloat16,
        (Stage.TAIL, "shared.activation"): torch.bfloat16,
        (Stage.TAIL, "shared.output"): torch.bfloat16,
        (Stage.TAIL, "summand"): torch.bfloat16,
        (Stage.TAIL, "reduced"): torch.bfloat16,
        (Stage.TAIL, "output"): torch.bfloat16,
        (Stage.GLUE_OUT, "returned"): torch.bfloat16,
        (Stage.GLUE_OUT, "shared.gate_up"): torch.bfloat16,
        (Stage.GLUE_OUT, "shared.activation"): torch.bfloat16,
        (Stage.GLUE_OUT, "shared.output"): torch.bfloat16,
        (Stage.GLUE_OUT, "hidden_states"): torch.bfloat16,
    }
)
"""A store is a rounding point: one that is left out stays inside every band."""


def check_contracts(subject: Subject, ledger: Ledger) -> None:
    """Every boundary of every rank."""
    for rank in subject.ranks:
        for what, check in (
            ("routed ids", _check_routed_ids),
            ("received ids", _check_received_ids),
            ("groups of rows", subject.view.check_groups),
            ("the shared expert's ranks", _check_shared),
            ("live rows", _check_live_rows),
            ("alignment of segments", _check_alignment),
            ("scales", check_scales),
            ("stores", _check_stores),
        ):
            with where_captured(ledger, what, CONTRACT):
                check(subject, rank, ledger)
                ledger.ask(CONTRACT)


def _check_shared(subject: Subject, rank: int, ledger: Ledger) -> None:
    """The shared expert is computed in the tail by those ranks that add it there."""
    traced = subject.stage(Stage.TAIL, rank)
    if rank not in subject.layer.ranks_with_shared_in_tail and "shared.output" in traced:
        detail = "a shared expert is computed where none is to be added"
        broken(ledger, Stage.TAIL, rank, "shared.output", detail)


def _check_routed_ids(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Routed ids are logical experts, then physical slots; or -1."""
    limits = {
        (Stage.ROUTE, "topk_ids"): subject.layer.num_experts,
        (Stage.DISPATCH, "physical_ids"): len(subject.layer.slot_experts),
    }
    for (stage, name), limit in limits.items():
        with where_captured(ledger, f"{stage}/{name}", CONTRACT):
            ids = subject.stage(stage, rank)[name]
            _expect_ids_under(limit, ids, lambda: subject.rows_of([rank]), (stage, name), ledger)


def _check_received_ids(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Ids of received rows are what the format says; or -1."""
    for name, limit in subject.view.id_limits(subject).items():
        ids = subject.stage(Stage.DISPATCH, rank)[name]
        place = (Stage.DISPATCH, name)
        _expect_ids_under(limit, ids, lambda: subject.received_rows(rank), place, ledger)


def _expect_ids_under(
    limit: int,
    ids: Tensor,
    rows_of: Callable[[], Rows],
    place: tuple[Stage, str],
    ledger: Ledger,
) -> None:
    """Enter the first id of [R, K] outside -1 up to under a limit; ``rows_of`` places its row."""
    wrong = ((ids < -1) | (ids >= limit)).nonzero()
    if wrong.numel():
        row, slot = wrong[0].tolist()
        rows = rows_of()
        token, rank = int(rows.token[row]), int(rows.rank[row])
        detail = f"id {int(ids[row, slot])} is outside -1..{limit - 1}; {len(wrong)} such ids"
        token_or_none = None if token < 0 else token
        broken(ledger, place[0], rank, place[1], detail, token=token_or_none, slot=slot)


def _check_live_rows(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Grouped rows named as worth computing, where they are, are those that hold a route."""
    traced = subject.stage(Stage.PRE_PERMUTE, rank)
    if "rows.live_rows" in traced:
        live, due = traced["rows.live_rows"], subject.view.live_rows_due(subject, rank)
        if not torch.equal(live.to(due.dtype), due):
            detail = f"{len(live)} live rows that are not the {len(due)} rows of the routes"
            broken(ledger, Stage.PRE_PERMUTE, rank, "rows.live_rows", detail)


def _check_alignment(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Segments are aligned as the library would answer for this platform and number of routes."""
    layer, traced = subject.layer, subject.stage(Stage.PRE_PERMUTE, rank)
    if layer.gemm_layout is not GemmLayout.CONTIG:
        return
    due = LARGEST_BLOCK
    if subject.view.folds_factor and not layer.wide_segments:
        slots = traced["restore.topk_ids"].numel()
        due = block_due(layer.platform, slots, layer.slots_per_rank)
    if layer.row_alignment != due:
        detail = f"segments are aligned to {layer.row_alignment} rows, {due} is due"
        broken(ledger, Stage.PRE_PERMUTE, rank, "rows.m_indices", detail)


def block_due(platform: Platform, num_routes: int, num_slots: int) -> int:
    """Rows of a block: a library steps down from the largest while an expert's mean still fits.

    Source: DeepGEMM, get_contiguous_layout_alignment, as the released 0.2.0 library answers.
    """
    if platform is Platform.SM90:
        return LARGEST_BLOCK
    mean = -(-num_routes // num_slots)
    block = 224 if platform is Platform.SM100 else LARGEST_BLOCK
    while block > SMALLEST_BLOCK and block - SMALLEST_BLOCK >= mean:
        block -= SMALLEST_BLOCK
    odd_one_out = platform is Platform.SM120 and block == 96
    return LARGEST_BLOCK if odd_one_out else min(block, LARGEST_BLOCK)


def _check_stores(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Values that no recipe quantises are stored in the dtype the pipeline declares."""
    activation = (Stage.ACTIVATION, "activation")
    stores = {**STORED_AS, **subject.view.stored_as, activation: activation_dtype(subject.layer)}
    for (stage, name), dtype in stores.items():
        tensor = subject.stage(stage, rank).get(name)  # not every layer leaves every tensor
        if tensor is not None and tensor.dtype != dtype:
            broken(ledger, stage, rank, name, f"stored as {tensor.dtype}; {dtype} is due")


def activation_dtype(layer: JudgedLayer) -> torch.dtype:
    """Kernels that quantise what they computed keep fp32 up to there; others store bf16."""
    stores = stores_of(layer.activation, layer.gemm_layout, layer.scale_format)
    return torch.float32 if stores is Stores.NOTHING else torch.bfloat16

"""What each stage boundary promises: ids, dtypes, layouts, alignment, segment lengths."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat, Stage
from moe.trace import StageTensors
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.subject import Subject

CONTRACT = "contract"
TMA_ALIGNED_WORDS = 4
GROUP = 128

STORED_AS: Final[Mapping[tuple[Stage, str], torch.dtype]] = MappingProxyType(
    {
        (Stage.WEIGHTS, "gate_weight"): torch.bfloat16,
        (Stage.WEIGHTS, "correction_bias"): torch.float32,
        (Stage.GLUE_IN, "hidden_states"): torch.bfloat16,
        (Stage.ROUTE, "logits"): torch.float32,
        (Stage.ROUTE, "topk_ids"): torch.int32,
        (Stage.ROUTE, "topk_weights"): torch.float32,
        (Stage.DISPATCH, "topk_ids"): torch.int64,
        (Stage.DISPATCH, "topk_weights"): torch.float32,
        (Stage.PRE_PERMUTE, "rows.m_indices"): torch.int32,
        (Stage.GEMM1, "gate_up"): torch.bfloat16,
        (Stage.ACTIVATION, "activation"): torch.bfloat16,
        (Stage.GEMM2, "output"): torch.bfloat16,
        (Stage.POST_PERMUTE, "partial"): torch.bfloat16,
        (Stage.COMBINE, "routed"): torch.bfloat16,
        (Stage.TAIL, "shared.gate_up"): torch.bfloat16,
        (Stage.TAIL, "shared.activation"): torch.bfloat16,
        (Stage.TAIL, "shared.output"): torch.bfloat16,
        (Stage.TAIL, "output"): torch.bfloat16,
        (Stage.GLUE_OUT, "hidden_states"): torch.bfloat16,
    }
)
"""A store is a rounding point: one that is left out stays inside every band."""


def check_contracts(subject: Subject, ledger: Ledger) -> None:
    """Every boundary of every rank."""
    ledger.ask(CONTRACT)
    for rank in subject.ranks:
        _check_ids(subject, rank, ledger)
        _check_counts(subject, rank, ledger)
        _check_segments(subject, rank, ledger)
        _check_layouts(subject, rank, ledger)
        _check_stores(subject, rank, ledger)


def _broken(
    ledger: Ledger,
    stage: Stage,
    rank: int,
    tensor: str,
    detail: str,
    *,
    token: int | None = None,
    slot: int | None = None,
) -> None:
    ledger.report(
        Deviation(
            check=CONTRACT,
            stage=stage,
            rank=rank,
            tensor=tensor,
            detail=detail,
            token=token,
            slot=slot,
        )
    )


def _check_ids(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Routed ids are logical experts or -1; received ids are local experts or -1."""
    for stage, limit in (
        (Stage.ROUTE, subject.layer.num_experts),
        (Stage.DISPATCH, len(subject.layer.local_experts[rank])),
    ):
        ids = subject.stage(stage, rank)["topk_ids"]
        wrong = ((ids < -1) | (ids >= limit)).nonzero()
        if wrong.numel():
            row, slot = wrong[0].tolist()
            tokens = (
                subject.own_tokens(rank) if stage is Stage.ROUTE else subject.received_tokens[rank]
            )
            detail = f"id {int(ids[row, slot])} is outside -1..{limit - 1}; {len(wrong)} such ids"
            _broken(ledger, stage, rank, "topk_ids", detail, token=int(tokens[row]), slot=slot)


def _check_counts(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Announced rows of an expert are its routes, rounded up to the alignment."""
    counts = subject.stage(Stage.DISPATCH, rank)["num_recv_tokens_per_expert"]
    local = subject.routes[rank].local
    alignment = subject.layer.row_alignment
    routes = torch.bincount(local, minlength=counts.shape[0])
    due = (routes + alignment - 1) // alignment * alignment
    for expert in (counts != due).nonzero()[:, 0].tolist():
        ledger.report(
            Deviation(
                check=CONTRACT,
                stage=Stage.DISPATCH,
                rank=rank,
                tensor="num_recv_tokens_per_expert",
                expert=subject.layer.local_experts[rank][expert],
                got=float(counts[expert]),
                want=float(due[expert]),
                detail=f"{int(routes[expert])} routes announced as {int(counts[expert])} rows, "
                f"due {int(due[expert])} (multiples of {alignment})",
            )
        )


def _check_segments(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Grouped rows lie expert by expert in segments as long as announced, padding included."""
    counts = subject.stage(Stage.DISPATCH, rank)["num_recv_tokens_per_expert"]
    m_indices = subject.stage(Stage.PRE_PERMUTE, rank)["rows.m_indices"]
    due = torch.arange(counts.shape[0], dtype=torch.int32).repeat_interleave(counts.clamp_min(0))
    if m_indices.shape != due.shape or not torch.equal(m_indices, due):
        detail = f"{m_indices.shape[0]} rows that are not the announced segments {counts.tolist()}"
        _broken(ledger, Stage.PRE_PERMUTE, rank, "rows.m_indices", detail)
    slots, index = (
        subject.stage(Stage.DISPATCH, rank)["topk_ids"] >= 0,
        subject.stage(Stage.PRE_PERMUTE, rank)["restore.output_index"],
    )
    wrong = (slots != (index >= 0)).nonzero()
    if wrong.numel():
        row, slot = wrong[0].tolist()
        token = int(subject.received_tokens[rank][row])
        local = "a local" if slots[row, slot] else "no local"
        detail = f"output_index {int(index[row, slot])} where there is {local} route"
        _broken(
            ledger, Stage.PRE_PERMUTE, rank, "restore.output_index", detail, token=token, slot=slot
        )


def _check_layouts(subject: Subject, rank: int, ledger: Ledger) -> None:
    """dtypes, shapes and strides of the quantised rows at each boundary."""
    for stage, name in (
        (Stage.DISPATCH, "wire"),
        (Stage.DISPATCH, "hidden_states"),
        (Stage.PRE_PERMUTE, "rows.hidden_states"),
        (Stage.ACTIVATION, "hidden_states"),
        (Stage.TAIL, "shared.input"),
        (Stage.TAIL, "shared.hidden_states"),
    ):
        traced = subject.stage(stage, rank)
        problem = _layout_problem(subject, traced, name) if name in traced else None
        if problem:
            _broken(ledger, stage, rank, name, problem)


def _check_stores(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Values that no recipe quantises are stored in the dtype the pipeline declares."""
    for (stage, name), dtype in STORED_AS.items():
        tensor = subject.stage(stage, rank).get(name)  # not every layer has a bias or shared expert
        if tensor is not None and tensor.dtype != dtype:
            _broken(ledger, stage, rank, name, f"stored as {tensor.dtype}; {dtype} is due")


def _layout_problem(subject: Subject, traced: StageTensors, name: str) -> str | None:
    layer = subject.layer
    values, scale = traced[name], traced.get(f"{name}_scale")
    if layer.recipe is QuantRecipe.BF16:
        fits = values.dtype == torch.bfloat16 and scale is None
        return None if fits else f"{values.dtype} with scales: {scale is not None}; bf16 is due"
    if values.dtype != torch.float8_e4m3fn or scale is None:
        return f"{values.dtype} with scales: {scale is not None}; e4m3 with scales is due"
    groups = -(-values.shape[1] // GROUP)
    if layer.scale_format is ScaleFormat.FP32:
        return _expect(scale, torch.float32, (values.shape[0], groups), None)
    rows = values.shape[0]
    stride = (1, -(-rows // TMA_ALIGNED_WORDS) * TMA_ALIGNED_WORDS)
    return _expect(scale, torch.int32, (rows, -(-groups // 4)), stride)


def _expect(
    scale: Tensor, dtype: torch.dtype, shape: tuple[int, int], stride: tuple[int, int] | None
) -> str | None:
    if scale.dtype != dtype or tuple(scale.shape) != shape:
        return f"scales {scale.dtype} {list(scale.shape)}; {dtype} {list(shape)} are due"
    if stride is not None and scale.numel() and scale.stride() != stride:
        return f"scale strides {scale.stride()}; MN-major {stride} are due"
    return None

"""What quantised tensors look like at each boundary: dtypes, shapes, strides, spare bytes.

A power-of-two scale is one byte, an exponent: no mantissa, no sign; 255 is no number.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat, Stage
from reports.verdict.decode import BLOCK, NO_NUMBER, num_words
from reports.verdict.deviation import Breach
from reports.verdict.layer import JudgedLayer, ScaleForm
from reports.verdict.ledger import Ledger
from reports.verdict.rows import take_rows
from reports.verdict.stage_checks import broken
from reports.verdict.subject import Subject

TMA_ALIGNED_WORDS: Final = 4

ROWS_WITH_SCALES: Final = (
    (Stage.PRE_PERMUTE, "rows.hidden_states"),
    (Stage.ACTIVATION, "hidden_states"),
    (Stage.TAIL, "shared.input"),
    (Stage.TAIL, "shared.hidden_states"),
    (Stage.GLUE_OUT, "shared.input"),
    (Stage.GLUE_OUT, "shared.hidden_states"),
)


def check_scales(subject: Subject, rank: int, ledger: Ledger) -> None:
    """Quantised rows at each boundary, and the weights that they meet."""
    for stage, name in _tensors(subject):
        traced = subject.stage(stage, rank)
        if name not in traced:
            continue
        form = _form_problem(subject, rank, stage, name)
        problem = form or _layout_problem(subject, rank, stage, name)
        problem = problem or _bytes_problem(subject, rank, stage, name)
        if problem:
            breach = Breach.FORM_OF_SCALES if form else None
            broken(ledger, stage, rank, name, problem, breach=breach)
    for group in ("experts", "shared"):
        for matrix in ("w13", "w2"):
            problem = _weight_problem(subject, rank, group, matrix)
            if problem:
                broken(ledger, Stage.WEIGHTS, rank, f"{group}.{matrix}", problem)


def _tensors(subject: Subject) -> Iterator[tuple[Stage, str]]:
    """Boundaries with quantised rows, as far as the recipe has them."""
    yield from ((Stage.DISPATCH, name) for name in subject.view.quantised)
    yield from ROWS_WITH_SCALES


def _form_problem(subject: Subject, rank: int, stage: Stage, name: str) -> str | None:
    """Scales of another dtype or shape than is read."""
    traced, form = subject.stage(stage, rank), subject.layer.scales_of(stage, name)
    values, scale = traced[name], traced.get(f"{name}_scale")
    if form.scale_format is ScaleFormat.NONE or scale is None:
        return None
    if values.dtype != torch.float8_e4m3fn:
        return None  # nor are scales read
    problem = _wrong_form(scale, form, values.shape)
    if problem and form.scale_format is ScaleFormat.UE8M0 and scale.dtype == torch.float32:
        odd = _no_powers(_held(subject, rank, stage, name))
        problem += f"; {odd} of them are no powers of two" if odd else ""
    return problem


def _layout_problem(subject: Subject, rank: int, stage: Stage, name: str) -> str | None:
    """No scales where there should be some, or the reverse; other strides."""
    layer, traced = subject.layer, subject.stage(stage, rank)
    values, scale = traced[name], traced.get(f"{name}_scale")
    form = layer.scales_of(stage, name)
    if form.scale_format is ScaleFormat.NONE:
        fits = values.dtype == torch.bfloat16 and scale is None
        return None if fits else f"{values.dtype} with scales: {scale is not None}; bf16 is due"
    if values.dtype != torch.float8_e4m3fn or scale is None:
        return f"{values.dtype} with scales: {scale is not None}; e4m3 with scales is due"
    return _wrong_strides(scale, values.shape[-2], in_columns=lies_in_columns(layer, stage, name))


def lies_in_columns(layer: JudgedLayer, stage: Stage, name: str) -> bool:
    """Whether the scales of a tensor have their rows along the fastest axis."""
    is_packed = layer.scales_of(stage, name).scale_format is ScaleFormat.UE8M0
    return is_packed or _is_tma_aligned(layer, stage, name)


def _is_tma_aligned(layer: JudgedLayer, stage: Stage, name: str) -> bool:
    """Whether fp32 scales have their rows along the fastest axis.

    Where a kernel wrote them for the GEMM behind it, and on a low-latency wire; scales that rows
    are scattered with are row-major, and copied in front of the GEMM.

    Source: SGLang 0.5.21, moe_runner/deep_gemm.py (NEED_TMA_ALIGNED_SCALES); DeepEP,
    low_latency_dispatch.
    """
    if stage is Stage.ACTIVATION or name.startswith("shared."):
        return True
    return layer.dispatch_format.is_low_latency and not layer.bf16_wire


def _wrong_form(scale: Tensor, form: ScaleForm, shape: torch.Size) -> str | None:
    """Dtype or shape of the scales of [..., R, C] values, if they are others than are due."""
    groups = -(-shape[-1] // form.group_size)
    is_fp32 = form.scale_format is ScaleFormat.FP32
    dtype = torch.float32 if is_fp32 else torch.int32
    due = (*shape[:-1], groups if is_fp32 else num_words(groups))
    if scale.dtype != dtype or tuple(scale.shape) != due:
        return f"scales {scale.dtype} {list(scale.shape)}; {dtype} {list(due)} are due"
    return None


def _wrong_strides(scale: Tensor, rows: int, *, in_columns: bool) -> str | None:
    """Strides of the scales of so many rows, if they are others than are due."""
    tall = -(-rows // TMA_ALIGNED_WORDS) * TMA_ALIGNED_WORDS
    stride = (1, tall) if in_columns else (scale.shape[-1], 1)
    if scale.numel() and scale.stride()[-2:] != stride:
        kind = "MN-major" if in_columns else "row-major"
        return f"scale strides {scale.stride()}; {kind} {stride} are due"
    return None


def _no_powers(scale: Tensor) -> int:
    """How many fp32 scales have mantissa or sign bits, which packing leaves no room for."""
    bits = scale.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return int(((bits & 0x7FFFFF != 0) | (bits < 0)).sum())


def _bytes_problem(subject: Subject, rank: int, stage: Stage, name: str) -> str | None:
    """Exponent bytes of rows that hold something: spare ones are zero, the others numbers."""
    form = subject.layer.scales_of(stage, name)
    traced = subject.stage(stage, rank)
    scale = traced.get(f"{name}_scale")
    if scale is None or scale.dtype != torch.int32:
        return None
    scale, source = _held(subject, rank, stage, name), None
    if stage is Stage.ACTIVATION:
        source = take_rows(subject.grouped(stage, rank, "activation"), subject.computed[rank].row)
    elif name == "shared.hidden_states":
        source = traced["shared.activation"]
    return bytes_problem(scale, -(-traced[name].shape[-1] // form.group_size), source)


def _held(subject: Subject, rank: int, stage: Stage, name: str) -> Tensor:
    """Scales of the rows that hold a token or a route; padding may hold anything."""
    scale = subject.stage(stage, rank)[f"{name}_scale"].flatten(0, -2)
    if stage in (Stage.PRE_PERMUTE, Stage.ACTIVATION):
        return take_rows(scale, subject.computed[rank].row)
    if stage is Stage.DISPATCH and name == "hidden_states":
        received = subject.received_from[rank] >= 0
        return take_rows(scale, received.nonzero()[:, 0])
    return scale


def bytes_problem(scale: Tensor, groups: int, source: Tensor | None = None) -> str | None:
    """What is wrong with packed exponents [R, W]; a row whose source overflowed may be no number.

    Args:
        scale: int32, four bytes a word.
        groups: bytes of a row that mean something.
        source: [R, C] what was quantised; None: finite.
    """
    exponents = scale.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    spare = exponents[:, groups:].any(dim=1)
    if bool(spare.any()):
        rows = int(spare.sum())
        return f"scale bytes past group {groups} are not zero in {rows} of {len(scale)} rows"
    odd = (exponents[:, :groups] == NO_NUMBER).any(dim=1)
    if source is not None:
        odd &= source.isfinite().all(dim=1)
    if bool(odd.any()):
        return f"scales of row {int(odd.nonzero()[0])} are no numbers; {int(odd.sum())} such rows"
    return None


_WEIGHT_DTYPES: Final = {
    QuantRecipe.BF16: torch.bfloat16,
    QuantRecipe.MXFP4_W4A8: torch.uint8,
}


def weight_dtype(layer: JudgedLayer, *, shared: bool) -> torch.dtype:
    """Of prepared matrices of the routed experts, or of the shared one."""
    is_fp8 = shared and layer.recipe is QuantRecipe.MXFP4_W4A8
    return torch.float8_e4m3fn if is_fp8 else _WEIGHT_DTYPES.get(layer.recipe, torch.float8_e4m3fn)


def _weight_problem(subject: Subject, rank: int, group: str, matrix: str) -> str | None:
    """Prepared weights in the layout that the platform's GEMM reads; the same rows for all."""
    layer, traced = subject.layer, subject.stage(Stage.WEIGHTS, rank)
    name, is_shared = f"{group}.{matrix}", group == "shared"
    values, scale = traced.get(f"{name}.values"), traced.get(f"{name}.scale")
    if values is None:
        return None
    due = weight_dtype(layer, shared=is_shared)
    if values.dtype != due:
        return f"stored as {values.dtype}; {due} is due"
    if (scale is None) != (layer.scale_format is ScaleFormat.NONE):
        return f"with scales: {scale is not None}; scales are {layer.scale_format}"
    if scale is None or layer.scale_format is ScaleFormat.FP32:
        return _block_scale_problem(values, scale)
    group_size = layer.weight_group(shared=is_shared)
    columns = values.shape[-1] * (2 if values.dtype == torch.uint8 else 1)
    shape = torch.Size((*values.shape[:-1], columns))
    form = ScaleForm(ScaleFormat.UE8M0, group_size)
    problem = _wrong_form(scale, form, shape)
    problem = problem or _wrong_strides(scale, shape[-2], in_columns=True)
    return problem or bytes_problem(scale.flatten(0, -2), -(-columns // group_size))


def _block_scale_problem(values: Tensor, scale: Tensor | None) -> str | None:
    if scale is None:
        return None
    due = (len(values), -(-values.shape[1] // BLOCK), -(-values.shape[2] // BLOCK))
    if scale.dtype == torch.float32 and tuple(scale.shape) == due and scale.is_contiguous():
        return None
    return f"scales {scale.dtype} {list(scale.shape)}; contiguous fp32 {list(due)} are due"

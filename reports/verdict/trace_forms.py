"""What every tensor of a layer's trace has to be: its axes, and the dtypes it may have."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from moe.formats import GemmLayout, ScaleFormat, Stage
from reports.verdict.contracts import STORED_AS, activation_dtype
from reports.verdict.decode import BLOCK, num_words
from reports.verdict.formats.view import FormatView
from reports.verdict.layer import JudgedLayer
from reports.verdict.readable import sizes_on, tensors_due
from reports.verdict.scale_contracts import ROWS_WITH_SCALES, weight_dtype

Axis = str | int
INTEGERS: Final = (torch.int32, torch.int64)

_WEIGHTS_OF_ROUTES: Final = ("topk_weights", "restore.topk_weights", "pending_weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """One tensor that a rank may leave.

    axes      letters as in ``readable.SHAPES``, or sizes
    dtypes    any of them
    optional  nothing is lost without it
    """

    axes: tuple[Axis, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


_UNREAD: Final[Mapping[str, tuple[Axis, ...]]] = MappingProxyType(
    {
        "handle.sent_row": ("N",),
        "handle.send_counts": ("P",),
        "handle.recv_counts": ("P",),
        "handle.first_slot": ("N",),
        "handle.message": ("R",),
        "handle.messages.source_rank": ("Q",),
        "handle.messages.source_row": ("Q",),
        "handle.messages.sent_row": ("N",),
        "handle.messages.send_counts": ("P",),
        "handle.messages.recv_counts": ("P",),
        "handle.messages.first_slot": ("N",),
    }
)
"""Integers of dispatch that only the dispatcher's own way back reads."""


def forms_of(
    layer: JudgedLayer, view: FormatView, rank: int, *, has_bias: bool
) -> dict[tuple[Stage, str], TensorForm]:
    """Every tensor that a rank may leave, in the order of stages.

    Args:
        layer: facts of the layer.
        view: what its dispatch format promises.
        rank: whose sizes they have.
        has_bias: the checkpoint has a correction bias.
    """
    forms = dict(_weights(layer, rank))
    bias = TensorForm(axes=("E",), dtypes=(torch.float32,), optional=not has_bias)
    forms[Stage.WEIGHTS, "correction_bias"] = bias
    for stage, name, axes in tensors_due(layer, view, rank):
        forms.setdefault(
            (stage, name), TensorForm(axes=axes, dtypes=_dtypes(layer, view, stage, name))
        )
    for stage, name in _with_scales(view):
        form = layer.scales_of(stage, name)
        if (stage, name) in forms and form.scale_format is not ScaleFormat.NONE:
            forms[stage, f"{name}_scale"] = _scale(layer, rank, forms[stage, name], stage, name)
    for name, unread in _UNREAD.items():
        form_of_it = TensorForm(axes=unread, dtypes=INTEGERS, optional=True)
        forms.setdefault((Stage.DISPATCH, name), form_of_it)
    if layer.gemm_layout is GemmLayout.CONTIG:
        live = TensorForm(axes=("live",), dtypes=INTEGERS, optional=True)
        forms[Stage.PRE_PERMUTE, "rows.live_rows"] = live
    return dict(sorted(forms.items(), key=lambda item: item[0][0].position))


def _with_scales(view: FormatView) -> Iterator[tuple[Stage, str]]:
    yield Stage.GLUE_IN, "wire"
    yield from ((Stage.DISPATCH, name) for name in view.quantised)
    yield from ROWS_WITH_SCALES


def _dtypes(
    layer: JudgedLayer, view: FormatView, stage: Stage, name: str
) -> tuple[torch.dtype, ...]:
    stored = {**STORED_AS, **view.stored_as}
    if (stage, name) == (Stage.ACTIVATION, "activation"):
        return (activation_dtype(layer),)
    if (stage, name) in stored:
        return (stored[stage, name],)
    if (stage, name) in _with_scales(view):
        is_bf16 = layer.scales_of(stage, name).scale_format is ScaleFormat.NONE
        return (torch.bfloat16 if is_bf16 else torch.float8_e4m3fn,)
    return (torch.float32,) if name in _WEIGHTS_OF_ROUTES else INTEGERS


def _scale(
    layer: JudgedLayer, rank: int, values: TensorForm, stage: Stage, name: str
) -> TensorForm:
    """Of quantised rows: one for each group of columns, or four of them in a word."""
    form, last = layer.scales_of(stage, name), values.axes[-1]
    columns = last if isinstance(last, int) else sizes_on(layer, rank)[last]
    groups = -(-columns // form.group_size)
    if form.scale_format is ScaleFormat.FP32:
        return TensorForm(axes=(*values.axes[:-1], groups), dtypes=(torch.float32,))
    return TensorForm(axes=(*values.axes[:-1], num_words(groups)), dtypes=(torch.int32,))


def _weights(layer: JudgedLayer, rank: int) -> Iterator[tuple[tuple[Stage, str], TensorForm]]:
    """Prepared matrices with their scales, and what the router holds."""
    sizes, slots = sizes_on(layer, rank), layer.slots_per_rank
    matrices: dict[str, tuple[int, int, int]] = {
        "experts.w13": (slots, sizes["2I"], sizes["D"]),
        "experts.w2": (slots, sizes["D"], sizes["I"]),
    }
    if layer.shared is not None:
        matrices["shared.w13"] = (1, sizes["2J"], sizes["H"])
        matrices["shared.w2"] = (1, sizes["H"], sizes["J"])
    for name, (experts, rows, columns) in matrices.items():
        is_shared = name.startswith("shared.")
        dtype = weight_dtype(layer, shared=is_shared)
        cells = columns // 2 if dtype is torch.uint8 else columns
        values = TensorForm(axes=(experts, rows, cells), dtypes=(dtype,))
        yield (Stage.WEIGHTS, f"{name}.values"), values
        match layer.scale_format:
            case ScaleFormat.FP32:
                blocks = (experts, -(-rows // BLOCK), -(-columns // BLOCK))
                scale = TensorForm(axes=blocks, dtypes=(torch.float32,))
                yield (Stage.WEIGHTS, f"{name}.scale"), scale
            case ScaleFormat.UE8M0:
                groups = -(-columns // layer.weight_group(shared=is_shared))
                words = (experts, rows, num_words(groups))
                scale = TensorForm(axes=words, dtypes=(torch.int32,))
                yield (Stage.WEIGHTS, f"{name}.scale"), scale

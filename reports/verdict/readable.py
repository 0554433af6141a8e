"""Whether traces can be judged at all: every tensor there, in the shape its name promises."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch

from moe.formats import GemmLayout, QuantRecipe, ScaleFormat, SharedExpertMode, Stage
from moe.trace import RankTrace, StageTensors
from reports.verdict.decode import num_words
from reports.verdict.formats.view import Axes, FormatView
from reports.verdict.layer import JudgedLayer
from topology.sync import Gather, Reducer

SHAPES: Final[Mapping[Stage, Mapping[str, Axes]]] = MappingProxyType(
    {
        Stage.WEIGHTS: {
            "expert_ids": ("L",),
            "experts.w13.values": ("L", "2I", "Dw"),
            "experts.w2.values": ("L", "D", "Iw"),
            "gate_weight": ("E", "H"),
        },
        Stage.GLUE_IN: {"own": ("O", "H"), "hidden_states": ("T", "H")},
        Stage.ROUTE: {"logits": ("T", "E"), "topk_ids": ("T", "K"), "topk_weights": ("T", "K")},
        Stage.COMBINE: {"routed": ("T", "H")},
        Stage.TAIL: {"output": ("T", "H")},
        Stage.GLUE_OUT: {"hidden_states": ("O", "H")},
    }
)
"""Axes: O own rows, T layer rows, R received rows (R = T where nothing travels), K top-k.

D is H in front of the experts, padding included. Dw and Iw are D and I in cells of weights, of
which one holds two fp4 codes.
"""

GROUPED: Final[Mapping[GemmLayout, Mapping[Stage, Mapping[str, Axes]]]] = MappingProxyType(
    {
        GemmLayout.CONTIG: {
            Stage.PRE_PERMUTE: {"rows.hidden_states": ("M", "D"), "rows.m_indices": ("any",)},
            Stage.GEMM1: {"gate_up": ("M", "2I")},
            Stage.ACTIVATION: {"activation": ("M", "I"), "hidden_states": ("M", "I")},
            Stage.GEMM2: {"output": ("M", "D")},
        },
        GemmLayout.MASKED: {
            Stage.PRE_PERMUTE: {"rows.hidden_states": ("L", "S", "D"), "rows.masked_m": ("L",)},
            Stage.GEMM1: {"gate_up": ("L", "S", "2I")},
            Stage.ACTIVATION: {"activation": ("L", "S", "I"), "hidden_states": ("L", "S", "I")},
            Stage.GEMM2: {"output": ("L", "S", "D")},
        },
    }
)
"""Axes: M grouped rows, S rows of a slab, I this rank's part of the intermediate axis.

How many rows ``m_indices`` has is a contract, and judged as one.
"""


HASHED: Final[Mapping[Stage, Mapping[str, Axes]]] = MappingProxyType(
    {Stage.WEIGHTS: {"tid2eid": ("V", "K")}, Stage.GLUE_IN: {"input_ids": ("T",)}}
)
"""Of a layer whose experts come from a table over V vocabulary ids."""


class UnreadableTraceError(ValueError):
    """A trace that no check can be asked about.

    tensor  whose form is none that could be read; empty where there is no tensor
    """

    def __init__(self, rank: int, stage: Stage, detail: str, tensor: str = "") -> None:
        super().__init__(rank, stage, detail, tensor)
        self.rank = rank
        self.stage = stage
        self.detail = detail
        self.tensor = tensor

    def __str__(self) -> str:
        return f"stage {self.stage} of rank {self.rank}: {self.detail}"


def check_readable(layer: JudgedLayer, view: FormatView, traces: Sequence[RankTrace]) -> None:
    """Look at names and shapes of every rank.

    Raises:
        UnreadableTraceError: the first trace that cannot be judged.
    """
    for rank, trace in enumerate(traces):
        sizes = sizes_on(layer, rank)
        for stage in Stage:
            if stage not in trace.stages:
                raise UnreadableTraceError(rank, stage, "not captured")
        for stage, name, axes in tensors_due(layer, view, rank):
            _check_shape(rank, stage, name, trace[stage], axes, sizes)
            _check_scale(layer, rank, stage, name, traces)
        for stage in Stage:
            names = set(traces[0][stage])
            if stage is Stage.TAIL and rank not in layer.ranks_with_shared_in_tail:
                names = {name for name in names if not name.startswith("shared.")}
            _check_names(rank, stage, trace[stage], names)


def sizes_on(layer: JudgedLayer, rank: int) -> dict[str, int]:
    """What the letters of axes stand for on a rank, as far as the layer says."""
    codes_a_cell = 2 if layer.recipe is QuantRecipe.MXFP4_W4A8 else 1
    width = layer.intermediate_size // layer.expert_shard(rank).count
    shared_width = layer.shared_intermediate_size // layer.shared_shard(rank).count
    return {
        "O": len(layer.sync.entry[rank]),
        "T": len(layer.sync.layer[rank]),
        "H": layer.hidden_size,
        "D": layer.expert_hidden_size,
        "K": layer.top_k,
        "E": layer.num_experts,
        "L": layer.slots_per_rank,
        "P": layer.layout.ep,
        "I": width,
        "2I": 2 * width,
        "Dw": layer.expert_hidden_size // codes_a_cell,
        "Iw": width // codes_a_cell,
        "J": shared_width,
        "2J": 2 * shared_width,
    }


def tensors_due(
    layer: JudgedLayer, view: FormatView, rank: int
) -> Iterator[tuple[Stage, str, Axes]]:
    """Every tensor that a rank of this layer leaves, scales aside."""
    tables = [SHAPES, view.shapes, GROUPED[layer.gemm_layout]]
    if layer.routing.hashed:
        tables.append(HASHED)
    if layer.gathers_fp8 and layer.sync.gather is Gather.ALL_GATHER_V:
        tables.append({Stage.GLUE_IN: {"wire": ("O", "H")}})
    if rank in layer.ranks_with_shared_in_tail:
        tables.append({Stage.TAIL: _shared_shapes("T")})
    if layer.shared is SharedExpertMode.LOCAL:
        tables.append({Stage.GLUE_OUT: {"returned": ("O", "H"), **_shared_shapes("O")}})
    if not layer.is_all_to_all:
        tables.append({Stage.TAIL: {"summand": ("T", "H")}})
    if layer.sync.reducer is Reducer.TAIL:
        tables.append({Stage.TAIL: {"reduced": ("T", "H")}})
    for table in tables:
        for stage, shapes in table.items():
            for name, axes in shapes.items():
                yield stage, name, axes


def _shared_shapes(rows: str) -> Mapping[str, Axes]:
    """The shared expert's steps over these rows; J is this rank's part of its width."""
    return {
        "shared.input": (rows, "H"),
        "shared.gate_up": (rows, "2J"),
        "shared.activation": (rows, "J"),
        "shared.hidden_states": (rows, "J"),
        "shared.output": (rows, "H"),
    }


def _check_names(rank: int, stage: Stage, mine: StageTensors, names: Collection[str]) -> None:
    """A stage leaves the tensors of rank 0, scales included.

    A shared expert that no rank but the first should add is a finding, not unreadable.
    """
    extra = {name for name in mine if not name.startswith("shared.")} - set(names)
    differing = sorted(extra | (set(names) - mine.keys()))
    if differing:
        detail = f"{', '.join(differing)} here or on rank 0, but not on both"
        raise UnreadableTraceError(rank, stage, detail)


def _check_scale(
    layer: JudgedLayer, rank: int, stage: Stage, name: str, traces: Sequence[RankTrace]
) -> None:
    """Scales have a row for each row that they scale, a column for each group or four of them.

    Packed on one rank and not on another they are not rows of one table.
    """
    tensor, tensors = f"{name}_scale", traces[rank][stage]
    scale, first = tensors.get(tensor), traces[0][stage].get(tensor)
    if scale is None or first is None:
        return
    form = layer.scales_of(stage, name)
    if form.scale_format is ScaleFormat.NONE:
        return
    is_packed = scale.dtype == torch.int32
    groups = -(-tensors[name].shape[-1] // form.group_size)
    due = (*tensors[name].shape[:-1], num_words(groups) if is_packed else groups)
    if tuple(scale.shape) != due:
        detail = f"{tensor} is {scale.dtype} {list(scale.shape)}, not {list(due)}"
        raise UnreadableTraceError(rank, stage, detail, tensor)
    if is_packed != (first.dtype == torch.int32):
        detail = f"{tensor} is {scale.dtype} here and {first.dtype} on rank 0"
        raise UnreadableTraceError(rank, stage, detail, tensor)


def _check_shape(
    rank: int,
    stage: Stage,
    name: str,
    tensors: StageTensors,
    axes: tuple[str, ...],
    sizes: dict[str, int],
) -> None:
    if name not in tensors:
        raise UnreadableTraceError(rank, stage, f"no tensor {name}; there are {', '.join(tensors)}")
    shape = tuple(tensors[name].shape)
    if not fits(shape, axes, sizes):
        due = [sizes.get(axis, -1) for axis in axes]
        raise UnreadableTraceError(rank, stage, f"{name} is {list(shape)}, not {due} {axes}", name)


def fits(shape: Sequence[int], axes: Sequence[str | int], sizes: dict[str, int]) -> bool:
    """Whether a shape is that of its axes: letters or sizes.

    A letter that has no size yet takes the one that it meets, in ``sizes``.
    """
    if len(shape) != len(axes):
        return False
    due = [
        axis if isinstance(axis, int) else sizes.setdefault(axis, size)
        for axis, size in zip(axes, shape, strict=True)
    ]
    return list(shape) == due

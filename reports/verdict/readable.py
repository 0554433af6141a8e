"""Whether traces can be judged at all: every tensor there, in the shape its name promises."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch

from moe.formats import Stage
from moe.trace import RankTrace, StageTensors
from reports.verdict.subject import JudgedLayer

SHAPES: Final[Mapping[Stage, Mapping[str, tuple[str, ...]]]] = MappingProxyType(
    {
        Stage.WEIGHTS: {
            "expert_ids": ("L",),
            "experts.w13.values": ("L", "2I", "H"),
            "experts.w2.values": ("L", "H", "I"),
            "gate_weight": ("E", "H"),
        },
        Stage.GLUE_IN: {"hidden_states": ("T", "H")},
        Stage.ROUTE: {"logits": ("T", "E"), "topk_ids": ("T", "K"), "topk_weights": ("T", "K")},
        Stage.DISPATCH: {
            "wire": ("T", "H"),
            "topk_ids": ("R", "K"),
            "topk_weights": ("R", "K"),
            "hidden_states": ("R", "H"),
            "handle.source_rank": ("R",),
            "handle.source_row": ("R",),
            "num_recv_tokens_per_expert": ("L",),
        },
        Stage.PRE_PERMUTE: {
            "rows.hidden_states": ("M", "H"),
            "rows.m_indices": ("any",),
            "restore.topk_ids": ("R", "K"),
            "restore.topk_weights": ("R", "K"),
            "restore.output_index": ("R", "K"),
        },
        Stage.GEMM1: {"gate_up": ("M", "2I")},
        Stage.ACTIVATION: {"activation": ("M", "I"), "hidden_states": ("M", "I")},
        Stage.GEMM2: {"output": ("M", "H")},
        Stage.POST_PERMUTE: {"partial": ("R", "H")},
        Stage.COMBINE: {"routed": ("T", "H")},
        Stage.TAIL: {"output": ("T", "H")},
        Stage.GLUE_OUT: {"hidden_states": ("T", "H")},
    }
)
"""Axes: T own tokens, R received rows, M grouped rows (R and M as the first tensor has them).

How many rows ``m_indices`` has is a contract, and judged as one.
"""


class UnreadableTraceError(ValueError):
    """A trace that no check can be asked about."""

    def __init__(self, rank: int, stage: Stage, detail: str) -> None:
        super().__init__(rank, stage, detail)
        self.rank = rank
        self.stage = stage
        self.detail = detail

    def __str__(self) -> str:
        return f"stage {self.stage} of rank {self.rank}: {self.detail}"


def check_readable(layer: JudgedLayer, traces: Sequence[RankTrace]) -> None:
    """Look at names, shapes and row owners of every rank.

    Raises:
        UnreadableTraceError: the first trace that cannot be judged.
    """
    for rank, trace in enumerate(traces):
        sizes = {
            "T": layer.tokens[rank],
            "H": layer.hidden_size,
            "K": layer.top_k,
            "E": layer.num_experts,
            "L": len(layer.local_experts[rank]),
        }
        for stage, shapes in SHAPES.items():
            if stage not in trace.stages:
                raise UnreadableTraceError(rank, stage, "not captured")
            for name, axes in shapes.items():
                _check_shape(rank, stage, name, trace[stage], axes, sizes)
            _check_names(rank, stage, trace[stage], traces[0][stage])
        _check_owners(layer, rank, trace[Stage.DISPATCH])


def _check_names(rank: int, stage: Stage, mine: StageTensors, first: StageTensors) -> None:
    """A stage leaves the same tensors on every rank, scales included."""
    differing = sorted(mine.keys() ^ first.keys())
    if differing:
        detail = f"{', '.join(differing)} here or on rank 0, but not on both"
        raise UnreadableTraceError(rank, stage, detail)


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
    if len(shape) == len(axes):
        for axis, size in zip(axes, shape, strict=True):
            sizes.setdefault(axis, size)
    due = tuple(sizes.get(axis, -1) for axis in axes)
    if shape != due:
        raise UnreadableTraceError(rank, stage, f"{name} is {list(shape)}, not {list(due)} {axes}")


def _check_owners(layer: JudgedLayer, rank: int, dispatched: StageTensors) -> None:
    """Every received row is a token that its source rank owns."""
    source, row = dispatched["handle.source_rank"], dispatched["handle.source_row"]
    owned = torch.tensor(layer.tokens)
    known = (source >= 0) & (source < layer.world_size)
    fits = known & (row >= 0) & (row < owned[source.clamp(0, layer.world_size - 1)])
    if not bool(fits.all()):
        at = int((~fits).nonzero()[0])
        detail = f"received row {at} comes from row {int(row[at])} of rank {int(source[at])}"
        raise UnreadableTraceError(rank, Stage.DISPATCH, f"{detail}, which does not exist")

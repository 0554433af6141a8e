"""What runs before and after the MoE, and who reduces, as values.

Integers only: which token stands in which row of which rank at each of three points.

    entry   rows a rank holds after attention; padding included
    layer   rows the layer routes and computes, after the gather or split
    exit    rows it hands back: those of entry again
"""

from dataclasses import dataclass
from enum import StrEnum

from topology.splits import Rows


class Gather(StrEnum):
    """How the layer's rows come together, before routing."""

    NONE = "none"
    TENSOR_SPLIT = "tensor_split"
    ALL_GATHER = "all_gather"
    ALL_GATHER_V = "all_gather_v"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER_ALL_GATHER = "reduce_scatter_all_gather"


class Return(StrEnum):
    """How the owned rows come back, after the tail."""

    NONE = "none"
    ALL_GATHER = "all_gather"
    DP_SCATTER = "dp_scatter"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE_SCATTER_V = "reduce_scatter_v"


class Reducer(StrEnum):
    """Who adds the partial results of the ranks: exactly one of the stages."""

    COMBINE = "combine"
    TAIL = "tail"
    GLUE_OUT = "glue_out"


class Padding(StrEnum):
    """How long the slot of each attention-DP group is."""

    NONE = "none"
    SUM_LEN = "sum_len"
    MAX_LEN = "max_len"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncOptions:
    """What a scenario may choose about the glue; ``None`` is upstream's own rule.

    padding         SUM_LEN or MAX_LEN
    reduce          all_reduce, reduce_scatter, reduce_scatter_v or dp_scatter
    zigzag          context parallelism deals out blocks i and 2 * cp - 1 - i
    gatherv         SGLANG_DP_USE_GATHERV
    reduce_scatter  SGLANG_DP_USE_REDUCE_SCATTER
    force_max_len   the dispatcher pads every slot to the longest
    """

    padding: Padding | None = None
    reduce: str | None = None
    zigzag: bool = True
    gatherv: bool = False
    reduce_scatter: bool = False
    force_max_len: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPlan:
    """The glue of one forward.

    gather, returning, reducer  see their types
    padding        NONE where attention has a single DP group
    slots          rows of each slot of the gathered rows, in order: one a DP group or CP rank;
                   empty without a gather
    entry, layer   [ranks][rows] global token of each row, ``PADDING`` where there is none
    masks_padding  padding rows are left unrouted; otherwise they are routed and computed
    """

    gather: Gather
    returning: Return
    reducer: Reducer
    padding: Padding
    slots: tuple[int, ...]
    entry: tuple[Rows, ...]
    layer: tuple[Rows, ...]
    masks_padding: bool


class SyncError(ValueError):
    """A topology for which upstream defines no flow; the message says which rule."""


class PaddingError(SyncError):
    """A padding of slots that the topology does not have."""

"""The collectives that a plan makes due, in closed form: what a recorded run is checked against."""

from dataclasses import dataclass
from enum import StrEnum

from topology.layout import ParallelLayout
from topology.mesh import Group
from topology.sync_types import Gather, Reducer, Return, SyncPlan


class Carried(StrEnum):
    """What the rows of a call hold; their width and dtype follow."""

    HIDDEN_STATES = "hidden_states"
    INPUT_IDS = "input_ids"
    WIRE = "wire"
    WIRE_SCALE = "wire_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class DueCall:
    """One collective that a rank owes.

    stage  glue_in, tail or glue_out
    op     the verb of ``Collectives``
    rows   how many the rank hands to it
    """

    stage: str
    op: str
    group: Group
    rows: int
    carries: Carried


def collective_calls(
    plan: SyncPlan,
    layout: ParallelLayout,
    rank: int,
    *,
    input_ids: bool = False,
    fp8_wire: bool = False,
) -> tuple[DueCall, ...]:
    """What ``rank`` owes around the MoE, in order; the dispatcher's own calls come between.

    Args:
        plan: the glue.
        layout: the topology it was made for.
        rank: whose calls.
        input_ids: a hash layer, whose ids travel as its rows do.
        fp8_wire: gathered rows travel as fp8 codes and scales where the route allows it.
    """
    carried = [Carried.HIDDEN_STATES]
    if fp8_wire and plan.gather is Gather.ALL_GATHER_V:
        carried = [Carried.WIRE, Carried.WIRE_SCALE]
    if input_ids:
        carried.append(Carried.INPUT_IDS)
    gathered = _gather_verbs(plan, layout, rank)
    returned = _return_verbs(plan, layout, rank)
    if plan.reducer is Reducer.TAIL:
        returned = (("tail", "all_reduce", layout.world, len(plan.layer[rank])), *returned)
    return (
        *(
            DueCall(stage="glue_in", op=op, group=group, rows=rows, carries=what)
            for what in carried
            for op, group, rows in gathered
        ),
        *(
            DueCall(stage=stage, op=op, group=group, rows=rows, carries=Carried.HIDDEN_STATES)
            for stage, op, group, rows in returned
        ),
    )


def _gather_verbs(
    plan: SyncPlan, layout: ParallelLayout, rank: int
) -> tuple[tuple[str, Group, int], ...]:
    """Verb, group and rows of the calls that gather one tensor."""
    own = len(plan.entry[rank])
    match plan.gather:
        case Gather.NONE | Gather.TENSOR_SPLIT:
            return ()
        case Gather.ALL_GATHER | Gather.ALL_GATHER_V:
            return (("all_gather_v", layout.world, own),)
        case Gather.ALL_REDUCE:
            return (("all_reduce", layout.world, sum(plan.slots)),)
        case Gather.REDUCE_SCATTER_ALL_GATHER:
            return (
                ("reduce_scatter_v", layout.attention_tp_group(rank), own),
                ("all_gather_v", layout.world, own // layout.attn_tp),
            )


def _return_verbs(
    plan: SyncPlan, layout: ParallelLayout, rank: int
) -> tuple[tuple[str, str, Group, int], ...]:
    """Stage, verb, group and rows of the call that returns the rows, if there is one."""
    rows = len(plan.layer[rank])
    match plan.returning:
        case Return.NONE | Return.DP_SCATTER:
            return ()
        case Return.ALL_GATHER:
            return (("glue_out", "all_gather_v", layout.attention_tp_group(rank), rows),)
        case Return.REDUCE_SCATTER | Return.REDUCE_SCATTER_V:
            return (("glue_out", "reduce_scatter_v", layout.world, rows),)

"""Faults of the glue: which rows a rank takes before the layer, and keeps after it."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from moe.faults.kinds import FaultContext, Params, Plan, plan_fault, value_fault
from moe.formats import Stage
from moe.stages import GlueInOutput, GlueOutOutput
from topology.sync import Gather, Return


def token_shard_shifted(rows: GlueInOutput, context: FaultContext) -> GlueInOutput:
    """Of rows that all ranks of a group hold, the rank's part begins one row late."""
    own, part = rows.own, rows.hidden_states
    start = _place_of(part, own)
    if start is None or len(part) == len(own):
        return rows
    late = (start + 1 + torch.arange(len(part))) % len(own)
    return replace(rows, hidden_states=own[late])


def slot_of_next_group(left: GlueOutOutput, context: FaultContext) -> GlueOutOutput:
    """The rank cuts out the rows behind its own slot of the finished rows."""
    entered, finished = context.seen[Stage.GLUE_IN], context.seen[Stage.TAIL].output
    count = len(left.hidden_states)
    start = _place_of(entered.own, entered.hidden_states)
    if start is None or not torch.equal(left.hidden_states, finished[start : start + count]):
        return left
    behind = (start + count + torch.arange(count)) % len(finished)
    return replace(left, hidden_states=finished[behind])


def _place_of(rows: Tensor, among: Tensor) -> int | None:
    """Where ``rows`` begin in ``among``; None where they are not, or where there are none."""
    starts = range(len(among) - len(rows) + 1) if len(rows) else ()
    return next((s for s in starts if torch.equal(among[s : s + len(rows)], rows)), None)


def replicated_rows_dispatched(plan: Plan, params: Params, rank: int) -> Plan:
    """Ranks with equal rows keep and dispatch all of them, where each should keep a part."""
    if plan.sync.gather is not Gather.TENSOR_SPLIT:
        return plan
    sync = replace(plan.sync, gather=Gather.NONE, returning=Return.NONE, layer=plan.sync.entry)
    return replace(plan, sync=sync)


GLUE_FAULTS: Final = (
    value_fault(
        Stage.GLUE_IN,
        token_shard_shifted,
        "a rank's part of its group's rows begins one row late",
        "pytorch/torchtitan#3622",
    ),
    plan_fault(
        Stage.GLUE_IN,
        replicated_rows_dispatched,
        "rows that a group shares dispatched by each of its ranks",
        "vllm-project/vllm#24134",
    ),
    value_fault(
        Stage.GLUE_OUT,
        slot_of_next_group,
        "the rows of the next attention-DP group cut out",
        "lightseekorg/tokenspeed#405",
    ),
)

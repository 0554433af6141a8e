"""A scenario's topology in the words of ``topology``: both views of the ranks, and the glue."""

from moe.formats import DispatchFormat, Phase
from scenarios.schema import Scenario
from topology.layout import ParallelLayout
from topology.sync import Padding, SyncOptions, SyncPlan, sync_plan


def parallel_layout(scenario: Scenario) -> ParallelLayout:
    """Both views of the ranks."""
    attention, moe = scenario.parallel.attention, scenario.parallel.moe
    return ParallelLayout(
        attn_dp=attention.dp, attn_tp=attention.tp, cp=attention.cp, ep=moe.ep, moe_tp=moe.tp
    )


def sync_of(scenario: Scenario) -> SyncPlan:
    """The glue that the scenario's topology and switches call for.

    Raises:
        SyncError: upstream defines no flow for it; the rules refuse such scenarios before.
    """
    moe, batch = scenario.moe, scenario.batch
    return sync_plan(
        parallel_layout(scenario),
        batch.tokens,
        a2a=moe.dispatcher is not DispatchFormat.STANDARD,
        extend=batch.phase is Phase.EXTEND,
        options=SyncOptions(
            padding=None if batch.padding == "auto" else Padding(batch.padding),
            reduce=None if moe.reduce == "auto" else moe.reduce,
            zigzag=scenario.parallel.attention.cp_split == "zigzag",
            gatherv=moe.switches.dp_use_gatherv,
            reduce_scatter=moe.switches.dp_use_reduce_scatter,
            force_max_len=moe.switches.deepep_v2_force_max_len
            and moe.dispatcher is DispatchFormat.DEEPEP_V2,
        ),
    )

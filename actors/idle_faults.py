"""Which injected faults changed something, and which found nothing to act on."""

from collections.abc import Sequence

from actors.plan import LayerPlan
from actors.rank_program import RankReport
from actors.resolve import ResolvedScenario
from actors.result_rows import ModeRun
from moe.faults import ArmedFault, FaultKind


def idle_faults(resolved: ResolvedScenario, runs: Sequence[ModeRun]) -> list[str]:
    """Injected faults that changed nothing on any rank, as where their rank has no row."""
    acted = frozenset[str]().union(*(run.also_acted | acted_in(resolved, run) for run in runs))
    return [
        armed.name
        for armed in resolved.faults
        if not armed.fault.kind.is_of_the_judge and armed.name not in acted
    ]


def acted_in(resolved: ResolvedScenario, run: ModeRun) -> frozenset[str]:
    """Faults that changed something in a judged forward, as long as its traces are there."""
    return frozenset(
        armed.name
        for armed in resolved.faults
        if any(_has_acted(armed, report, resolved.plan) for report in run.reports)
    )


def _has_acted(armed: ArmedFault, report: RankReport, plan: LayerPlan) -> bool:
    """Whether a fault changed something on a rank; another plan needs rows at its stage."""
    if armed.name not in report.acted or armed.fault.kind is not FaultKind.PLAN:
        return armed.name in report.acted
    return any(tensor.numel() for tensor in report.trace[armed.stage_in(plan)].values())

"""From a checked scenario to what a run needs, or to the reasons why it cannot run."""

from dataclasses import dataclass

from actors.backends import Choice, backends_of
from actors.plan import LayerPlan
from actors.planning import judged_layer, plan_of
from moe.faults import ArmedFault, UnknownFaultError, arm
from reports.verdict.layer import JudgedLayer
from scenarios.errors import Problem, ScenarioError
from scenarios.loader import LoadedScenario
from scenarios.support import unsupported_reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScenario:
    """A scenario ready to run.

    plan      for the ranks
    judged    the same facts for the verdict
    faults    what is injected
    backends  axis -> choice
    """

    plan: LayerPlan
    judged: JudgedLayer
    faults: tuple[ArmedFault, ...]
    backends: dict[str, Choice]


def reasons_not_to_run(loaded: LoadedScenario) -> list[str]:
    """Why this version or machine does not run a scenario that is otherwise right."""
    reasons = list(unsupported_reasons(loaded.scenario, loaded.model))
    if loaded.scenario.run.runtime == "loopback":
        reasons += [
            f"fault {fault.name} ends or stops a process; ranks of loopback share one, use ray"
            for fault in arm_faults(loaded)
            if fault.fault.needs_process
        ]
    return reasons


def arm_faults(loaded: LoadedScenario) -> tuple[ArmedFault, ...]:
    """The scenario's faults with parameters and ranks settled.

    Raises:
        ScenarioError: names or parameters that do not exist.
    """
    armed, problems = [], []
    scenario = loaded.scenario
    groups = scenario.batch.tokens
    ranks_per_group = scenario.parallel.world_size // max(len(groups), 1)
    tokens = [count for count in groups for _ in range(ranks_per_group)]
    for fault in loaded.faults:
        try:
            armed.append(arm(fault.name, fault.params, tokens))
        except UnknownFaultError as error:
            problems.append(Problem("inject", str(error)))
    if problems:
        raise ScenarioError(str(loaded.path), problems)
    return tuple(armed)


def resolve(loaded: LoadedScenario) -> ResolvedScenario:
    """Settle everything a run needs.

    Args:
        loaded: a scenario for which ``reasons_not_to_run`` is empty.

    Raises:
        ScenarioError: see ``arm_faults``.
        CheckpointError: the weights file does not fit the model.
    """
    plan = plan_of(loaded)
    return ResolvedScenario(
        plan=plan,
        judged=judged_layer(plan, loaded),
        faults=arm_faults(loaded),
        backends=backends_of(loaded),
    )

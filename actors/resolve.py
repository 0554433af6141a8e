"""From a checked scenario to what a run needs, or to the reasons why it cannot run."""

from collections.abc import Mapping
from dataclasses import dataclass

from actors.backends import backends_of
from actors.machine import Choice, lacking
from actors.plan import LayerPlan
from actors.planning import judged_layer, plan_of
from moe.faults import ArmedFault, UnknownFaultError, arm
from reports.verdict.layer import JudgedLayer
from scenarios.errors import Problem, ScenarioError
from scenarios.loader import LoadedScenario
from scenarios.support import unsupported_reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedLayer:
    """One layer: for the ranks, and the same facts for the verdict."""

    plan: LayerPlan
    judged: JudgedLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScenario:
    """A scenario ready to run.

    layers    mode -> the layer that its forwards compute; layers differ in their weights alone
    faults    what is injected
    backends  axis -> choice
    """

    layers: Mapping[str, ResolvedLayer]
    faults: tuple[ArmedFault, ...]
    backends: dict[str, Choice]

    @property
    def plan(self) -> LayerPlan:
        """Of the first mode's layer."""
        return next(iter(self.layers.values())).plan

    @property
    def judged(self) -> JudgedLayer:
        """Of the first mode's layer."""
        return next(iter(self.layers.values())).judged


def reasons_not_to_run(loaded: LoadedScenario) -> list[str]:
    """Why this version or machine does not run a scenario that is otherwise right."""
    reasons = list(unsupported_reasons(loaded.scenario, loaded.model))
    reasons += lacking(loaded)
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
    return ResolvedScenario(
        layers=_layers(loaded), faults=arm_faults(loaded), backends=backends_of(loaded)
    )


def _layers(loaded: LoadedScenario) -> dict[str, ResolvedLayer]:
    """One layer a kind of weights: exact inputs need weights of their own, the others share."""
    made: dict[bool, ResolvedLayer] = {}
    layers: dict[str, ResolvedLayer] = {}
    for mode in loaded.scenario.inputs.modes:
        is_exact = mode == "exact"
        if is_exact not in made:
            plan = plan_of(loaded, mode)
            made[is_exact] = ResolvedLayer(plan=plan, judged=judged_layer(plan, loaded))
        layers[mode] = made[is_exact]
    return layers

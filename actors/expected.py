"""Whether a verdict, and what it names, is what a scenario expects."""

from moe.faults import FAULTS
from moe.faults.mistaken import NOT_DIAGNOSED
from reports.result import Finding, Verdict
from scenarios.errors import Problem, ScenarioError
from scenarios.loader import LoadedScenario


def is_expected(loaded: LoadedScenario, verdict: Verdict, first: Finding | None) -> bool:
    """Verdict, stage and mode; and a diagnosis of the kind that the expected fault has.

    Args:
        loaded: the scenario.
        verdict: of the run.
        first: its first finding, if there is any.
    """
    expect = loaded.scenario.expect
    if verdict != expect.verdict:
        return False
    if first is None:
        return True
    is_there = expect.stage == first.stage and expect.mode in (None, first.mode)
    if expect.fault is None or not is_there:
        return is_there
    return first.mistake in FAULTS[expect.fault].mistakes


def check_expected(loaded: LoadedScenario) -> None:
    """Refuse a fault that no diagnosis can name.

    Raises:
        ScenarioError: there is no such fault, or it leaves nothing to diagnose.
    """
    name = loaded.scenario.expect.fault
    if name is None or (name in FAULTS and FAULTS[name].mistakes):
        return
    reason = NOT_DIAGNOSED.get(name, "no kind of mistake is known for it")
    problem = Problem("expect.fault", f"no diagnosis can name {name}: {reason}")
    raise ScenarioError(str(loaded.path), [problem])


def wanted(loaded: LoadedScenario) -> str:
    """What a scenario expects, in words."""
    expect = loaded.scenario.expect
    where = f" in {expect.stage}" if expect.stage else ""
    return expect.verdict + where + (f", named as {expect.fault}" if expect.fault else "")

"""Which inputs go with which weights."""

from typing import Final

from scenarios.rules.rule import Rule, RuleKind, sections
from scenarios.schema import Scenario


def _exact_inputs_bring_their_weights(scenario: Scenario) -> str | None:
    kind = scenario.model.weights.kind
    if "exact" not in scenario.inputs.modes or kind == "synthetic":
        return None
    return (
        f"mode exact with weights from {kind}; exact inputs are tokens and weights together, so "
        "weights must be synthetic"
    )


def _expected_mode_runs(scenario: Scenario) -> str | None:
    mode, modes = scenario.expect.mode, scenario.inputs.modes
    if mode is None or mode in modes:
        return None
    return f"mode {mode!r} does not run; inputs.modes has {', '.join(modes)}"


INPUT_RULES: Final[tuple[Rule[Scenario], ...]] = (
    Rule(
        name="exact_inputs_bring_their_weights",
        kind=RuleKind.SEMANTIC,
        field="inputs.modes",
        reads=sections("inputs", "model"),
        check=_exact_inputs_bring_their_weights,
        source="moe-assay: sums are exact by what both operands hold",
    ),
    Rule(
        name="expected_mode_runs",
        kind=RuleKind.SEMANTIC,
        field="expect.mode",
        reads=sections("expect", "inputs"),
        check=_expected_mode_runs,
        source="moe-assay: an expectation that nothing can meet",
    ),
)

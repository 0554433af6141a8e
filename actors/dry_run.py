"""What ``--dry-run`` prints: what would run, what is refused, and how long it would take."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from actors.resolve import reasons_not_to_run
from actors.session import Work, scenarios_of
from actors.sweep import coverage_lines, refusal_lines, sweep_warnings
from moe.formats import QuantRecipe
from scenarios.loader import LoadedScenario
from scenarios.sweep import ExpandedSweep

# Measured on two cores over models of 3 to 25 million expert weights, in seconds.
_A_FORWARD: Final = 0.06
_A_WEIGHT: Final = 35e-9
"""Per weight of the routed experts, drawn, prepared and judged."""
_A_QUANTISED_WEIGHT: Final = 80e-9
_A_PRODUCT: Final = 0.6e-9
"""Per multiplication of the routed experts, in the forward and in each of the golden's."""
_A_RAY_RANK: Final = 1.3


def dry_run_lines(work: Sequence[Work]) -> Iterator[str]:
    """A line for each scenario and each legal row, refusals by rule, the minutes in all."""
    for one in work:
        if isinstance(one, ExpandedSweep):
            yield from _sweep_lines(one)
        else:
            yield _scenario_line(one.scenario.name, one)
            yield from (f"  note: {note}" for note in one.notes)
    seconds = sum(expected_seconds(each) for one in work for each in scenarios_of(one))
    yield f"expected: {seconds / 60:.1f} minutes"


def expected_seconds(loaded: LoadedScenario) -> float:
    """About how long a scenario takes; 0 if this version does not run it.

    An estimate from sizes alone, for a machine of two cores that does nothing else.
    """
    if reasons_not_to_run(loaded):
        return 0.0
    scenario, model = loaded.scenario, loaded.model
    expert = 3 * model.hidden_size * model.moe_intermediate_size
    products = sum(scenario.batch.tokens) * model.num_experts_per_tok * expert
    a_weight = _A_WEIGHT if scenario.moe.recipe is QuantRecipe.BF16 else _A_QUANTISED_WEIGHT
    weights = model.n_routed_experts * expert * a_weight
    forwards = len(scenario.inputs.modes) * scenario.run.rounds
    ranks = scenario.parallel.world_size * _A_RAY_RANK if scenario.run.runtime == "ray" else 0.0
    return ranks + weights + forwards * (_A_FORWARD + products * _A_PRODUCT)


def _sweep_lines(expanded: ExpandedSweep) -> Iterator[str]:
    name = expanded.sweep.name
    for row, loaded in expanded.legal:
        yield _scenario_line(f"{name}/{row.name}", loaded)
    for row, because in expanded.excluded:
        yield f"{name}/{row.name}: excluded: {because}"
    counts = f"{len(expanded.legal)} to run"
    if expanded.coverage is None:
        counts += f", {len(expanded.refused)} refused, {len(expanded.excluded)} excluded"
    yield f"{name}: {expanded.num_rows} rows: {counts}"
    yield from coverage_lines(expanded)
    yield from refusal_lines(expanded.refusals())
    notes = Counter(note for _, loaded in expanded.legal for note in loaded.notes)
    yield from (f"  note: in {rows} rows: {note}" for note, rows in notes.items())
    yield from (f"  warning: {warning}" for warning in sweep_warnings(expanded))


def _scenario_line(name: str, loaded: LoadedScenario) -> str:
    scenario, reasons = loaded.scenario, reasons_not_to_run(loaded)
    size = f"{scenario.parallel.world_size} ranks, {sum(scenario.batch.tokens)} tokens"
    modes, runtime = ", ".join(scenario.inputs.modes), scenario.run.runtime
    verdict = f"unsupported: {'; '.join(reasons)}" if reasons else "would run"
    return f"{name}: {verdict} ({size}, modes {modes}, {runtime})"

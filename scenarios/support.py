"""What this version does not run yet, as a table: a new feature deletes or widens a row."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from moe.formats import DispatchFormat, Platform, QuantRecipe, ScoringFunc
from scenarios.errors import shown
from scenarios.models import MoeModel
from scenarios.schema import Scenario, SwitchesSpec


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one key that run; a key that holds several needs each to be among them."""

    key: str
    runs: tuple[object, ...]


_SCENARIO_ROWS: Final = (
    Row("model.layer", ("moe",)),
    Row("parallel.attention.tp", (1,)),
    Row("parallel.attention.cp", (1,)),
    Row("parallel.moe.tp", (1,)),
    Row("moe.dispatcher", (DispatchFormat.DEEPEP_NORMAL,)),
    Row("moe.layout", ("auto", "compact")),
    Row("moe.expanded", ("auto",)),
    Row("moe.recipe", (QuantRecipe.BF16, QuantRecipe.FP8_BLOCK128)),
    Row("moe.shared_experts", ("auto", "replicated")),
    Row("moe.reduce", ("auto",)),
    Row("moe.redundant_experts", (0,)),
    Row("moe.placement", ("contiguous",)),
    Row("platform", (Platform.SM90, Platform.SM100)),
    Row("batch.padding", ("auto",)),
    Row("batch.routing.kind", ("router",)),
    Row("batch.routing.weights", ("auto", "router")),
    Row("inputs.modes", ("random", "file")),
    Row("run.device", ("auto", "cpu")),
    Row("run.rounds", (1,)),
    Row("run.backends.gemm", ("auto", "torch")),
    Row("run.backends.transport", ("auto", "loopback", "gloo")),
    Row("run.backends.kernels", ("auto", "torch")),
    Row("compare", (None,)),
    Row("expect.fault", (None,)),
)

_MODEL_ROWS: Final = (
    Row("scoring_func", (ScoringFunc.SQRTSOFTPLUS,)),
    Row("n_group", (1,)),
    Row("n_shared_experts", (0, 1, 2)),
    Row("shared_expert_gate", (False,)),
    Row("hidden_act", ("silu",)),
)


def unsupported_reasons(scenario: Scenario, model: MoeModel) -> list[str]:
    """Why this version cannot run a scenario that is otherwise right; empty if it can."""
    reasons = [reason for row in _SCENARIO_ROWS for reason in _reasons(row, scenario, row.key)]
    reasons += unsupported_model_reasons(model)
    return reasons + _spread_reasons(scenario) + _switch_reasons(scenario.moe.switches)


def unsupported_model_reasons(model: MoeModel) -> list[str]:
    """The part of ``unsupported_reasons`` that the model alone decides."""
    rows = [(row, f"{model.name}'s {row.key}") for row in _MODEL_ROWS]
    return [reason for row, name in rows for reason in _reasons(row, model, name)]


def running_values(key: str) -> tuple[object, ...]:
    """The values of a scenario key that this version runs; KeyError if it runs them all."""
    return {row.key: row.runs for row in _SCENARIO_ROWS}[key]


def _reasons(row: Row, holder: Scenario | MoeModel, name: str) -> list[str]:
    read: Callable[[object], Any] = attrgetter(row.key)
    value = read(holder)
    values = value if isinstance(value, tuple) else (value,)
    return [_sentence(name, item, row.runs) for item in values if item not in row.runs]


def _spread_reasons(scenario: Scenario) -> list[str]:
    """Attention DP and EP each over all ranks; rows of a fixed value cannot say that."""
    parallel, world = scenario.parallel, (scenario.parallel.world_size,)
    degrees = {
        "parallel.attention.dp": parallel.attention.dp,
        "parallel.moe.ep": parallel.moe.ep,
    }
    return [_sentence(key, value, world) for key, value in degrees.items() if value not in world]


def _switch_reasons(switches: SwitchesSpec) -> list[str]:
    defaults = SwitchesSpec()
    return [
        _sentence(f"moe.switches.{name}", value, (getattr(defaults, name),))
        for name, value in switches
        if value != getattr(defaults, name)
    ]


def _sentence(name: str, value: object, runs: tuple[object, ...]) -> str:
    return f"{name} {_plain(value)} does not run in this version; {_listed(runs)} does"


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(_plain(value) for value in values)


def _plain(value: object) -> str:
    return "null" if value is None else shown(value if isinstance(value, int) else str(value))

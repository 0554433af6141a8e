"""What this version does not run yet, as a table: a new feature deletes or widens a row."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from scenarios.errors import shown
from scenarios.families import ACTIVATIONS
from scenarios.models import MoeModel
from scenarios.schema import Scenario, SwitchesSpec


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one key that run; a key that holds several needs each to be among them.

    imports  ``package.module:Class`` runs as well
    """

    key: str
    runs: tuple[object, ...]
    imports: bool = False


_SCENARIO_ROWS: Final = (
    Row("run.backends.gemm", ("auto", "torch", "deep_gemm"), imports=True),
    Row("run.backends.transport", ("auto", "loopback", "gloo", "nccl")),
    Row("run.backends.kernels", ("auto", "torch", "triton")),
)

_MODEL_ROWS: Final = (
    Row("n_shared_experts", (0, 1, 2)),
    Row("shared_expert_gate", (False,)),
    Row("hidden_act", tuple(ACTIVATIONS)),
)

_SWITCHES: Final = frozenset(
    {
        "compact_eager",
        "silu_mul_keep_fp32",
        "masked_m_cap",
        "mask_dp_pad_moe",
        "deterministic",
        "masked_memory_budget_fraction",
        "deepep_bf16_dispatch",
        "deepep_v2_force_max_len",
        "max_dispatch_tokens_per_rank",
        "dp_use_gatherv",
        "dp_use_reduce_scatter",
        "dp_gather_fp8",
        "shared_expert_tp1",
        "dp_shared_expert_local",
    }
)
"""Switches of which every value runs."""


def unsupported_reasons(scenario: Scenario, model: MoeModel) -> list[str]:
    """Why this version cannot run a scenario that is otherwise right; empty if it can."""
    reasons = [reason for row in _SCENARIO_ROWS for reason in _reasons(row, scenario, row.key)]
    reasons += unsupported_model_reasons(model)
    return reasons + _switch_reasons(scenario.moe.switches)


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
    return [
        _sentence(name, item, row.runs)
        for item in values
        if item not in row.runs and not (row.imports and ":" in str(item))
    ]


def _switch_reasons(switches: SwitchesSpec) -> list[str]:
    defaults = SwitchesSpec()
    return [
        _sentence(f"moe.switches.{name}", value, (getattr(defaults, name),))
        for name, value in switches
        if name not in _SWITCHES and value != getattr(defaults, name)
    ]


def _sentence(name: str, value: object, runs: tuple[object, ...]) -> str:
    return f"{name} {_plain(value)} does not run in this version; {_listed(runs)} does"


def _listed(values: tuple[object, ...]) -> str:
    return " or ".join(_plain(value) for value in values)


def _plain(value: object) -> str:
    return "null" if value is None else shown(value if isinstance(value, int) else str(value))

"""What there is to run: scenario files, sweeps, presets, dispatchers and recipes, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from moe.formats import DispatchFormat
from moe.recipes import RECIPES
from scenarios.loader import load_scenario
from scenarios.models import MoeModel
from scenarios.presets import PRESET_SOURCES, PRESETS
from scenarios.support import unsupported_model_reasons, unsupported_reasons
from scenarios.sweep import expand, num_rows
from scenarios.sweep_file import read_sweep
from scenarios.sweep_schema import Strategy
from scenarios.yaml_text import read_file

_DISPATCHERS: Final[Mapping[DispatchFormat, str]] = MappingProxyType(
    {
        DispatchFormat.STANDARD: "no exchange: every rank sees all rows and keeps its experts'",
        DispatchFormat.FLASHINFER: "one-sided all-to-all, one copy a destination rank",
        DispatchFormat.DEEPEP_NORMAL: "DeepEP for prefill: one row a rank, expert segments",
        DispatchFormat.DEEPEP_LL: "DeepEP for decode: one row a route, one slab an expert",
        DispatchFormat.DEEPEP_V2: "DeepEP's elastic buffer: expanded in decode alone",
        DispatchFormat.MOONCAKE: "Mooncake's low-latency exchange",
        DispatchFormat.NIXL: "NIXL's low-latency exchange",
    }
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that a scenario can name, in a line; ``runs`` is whether this version runs it."""

    name: str
    about: str
    runs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioEntry:
    """One scenario file; ``unsupported`` says why this version does not run it, if so."""

    path: Path
    name: str
    about: str
    unsupported: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEntry:
    """One sweep file, and which rows of its product run."""

    path: Path
    about: str
    rows: str


def scenario_entries(paths: Sequence[Path]) -> list[ScenarioEntry]:
    """The scenarios in these files; ScenarioError on the first file that is wrong."""
    entries = []
    for path in paths:
        loaded = load_scenario(path)
        scenario = loaded.scenario
        reasons = tuple(unsupported_reasons(scenario, loaded.model))
        entries.append(
            ScenarioEntry(path=path, name=scenario.name, about=scenario.about, unsupported=reasons)
        )
    return entries


def sweep_entries(paths: Sequence[Path]) -> list[SweepEntry]:
    """The sweeps in these files; ScenarioError on the first file that is wrong.

    Rows of a covering array are not chosen here, which takes seconds.
    """
    entries = []
    for path in paths:
        sweep = read_sweep(read_file(path), path)
        rows = f"{sweep.strategy} of {num_rows(sweep)} rows"
        if sweep.strategy is Strategy.ALL:
            expanded = expand(sweep)
            rows = f"{len(expanded.legal)} of {expanded.num_rows} rows"
        entries.append(SweepEntry(path=path, about=sweep.about, rows=rows))
    return entries


def preset_entries() -> list[Entry]:
    """The published models by name, with their sizes and where those come from."""
    return [
        Entry(
            preset.value,
            f"{_sizes(model)} ({PRESET_SOURCES[preset]})",
            not unsupported_model_reasons(model),
        )
        for preset, model in PRESETS.items()
    ]


def dispatcher_entries() -> list[Entry]:
    """How tokens can travel."""
    return [Entry(form.value, about, runs=True) for form, about in _DISPATCHERS.items()]


def recipe_entries() -> list[Entry]:
    """The number formats of weights and activations."""
    return [Entry(name.value, recipe.about, runs=True) for name, recipe in RECIPES.items()]


def _sizes(model: MoeModel) -> str:
    experts = f"top-{model.num_experts_per_tok} of {model.n_routed_experts} experts"
    shared = f" + {model.n_shared_experts} shared" if model.n_shared_experts else ""
    widths = f"H {model.hidden_size}, I {model.moe_intermediate_size}"
    return f"{experts}{shared}, {widths}, {model.scoring_func}"

"""``run.py compare``: two runs of one model and one token list, read back or run here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from actors.by_mode import Keep
from actors.driver import check_input, run_scenario
from actors.judge_trace import JUDGED_TRACE
from actors.output import prepare_folder, write_outcome
from actors.planning import judged_layer, plan_of
from actors.sides import sides_of
from moe.faults import FAULTS
from moe.formats import Stage
from reports.compare_result import CheckDifference, ComparedRun, CompareResult, conclusion_of
from reports.record import Mode, Verdict
from reports.result import Check, CheckVerdict, Result
from reports.result_file import ResultError, read_result
from reports.verdict.canonical import OUTPUT, CanonicalForward, tokens_in_order
from reports.verdict.side_by_side import Side, distances, side_by_side
from scenarios.errors import UserError
from scenarios.loader import LoadedScenario
from scenarios.models import ModelError
from scenarios.resolve import resolve_model
from scenarios.schema import Scenario
from scenarios.sweep import load_path


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Run:
    """One of two runs.

    source  the file it came from
    sides   by mode; empty where ranks did not come back
    tokens  mode -> [T, H] bf16 that went in
    """

    source: Path
    result: Result
    sides: Mapping[Mode, Side]
    tokens: Mapping[Mode, Tensor]


_DECIDE_VALUES: Final = (
    ("model", "layer"),
    ("model", "weights"),
    ("inputs", "seed"),
    ("batch", "routing"),
)
"""Keys of a scenario that two runs have to share: what is computed, of which weights and routes."""


class NotComparableError(UserError):
    """Two runs of different things."""


def compare_runs(one: Run, other: Run) -> CompareResult:
    """Put two runs side by side.

    Raises:
        NotComparableError: another model, other weights or other tokens; all that differs.
    """
    reasons = _why_not(one, other)
    if reasons:
        lines = "".join(f"\n  {reason}" for reason in reasons)
        raise NotComparableError(f"{one.source} and {other.source} cannot be compared:{lines}")
    common = [mode for mode in one.sides if mode in other.sides]
    modes = [side_by_side(one.sides[mode], other.sides[mode]) for mode in common]
    checks = _differing_checks(one.result, other.result)
    runs = [
        _compared(run, name) for run, name in zip((one, other), _names(one, other), strict=True)
    ]
    parted = any(mode.stage is not None for mode in modes)
    same = not (parted or checks) and one.result.verdict is other.result.verdict
    return CompareResult(
        one=runs[0],
        other=runs[1],
        same=same,
        checks=checks,
        modes=modes,
        conclusion=conclusion_of(runs[0], runs[1], modes),
    )


def load_runs(paths: Sequence[Path], overrides: Sequence[str], out: Path | None) -> list[Run]:
    """Each path's run: a result or its folder is read, a scenario is run.

    Args:
        paths: two of them.
        overrides: as of ``--set``, for scenarios.
        out: folder for what is run here, in ``one`` and ``other``; None leaves nothing.

    Raises:
        UserError: neither a result nor a scenario, or one that does not fit; tensors are missing.
    """
    _expect_overridable(paths, overrides)
    scenarios = {path: _scenario(path, overrides) for path in paths if not _is_result(path)}
    runs = []
    for path, folder in zip(paths, ("one", "other"), strict=True):
        if path in scenarios:
            runs.append(_run(path, scenarios[path], out and out / folder))
        else:
            runs.append(_read(path))
    names = _names(*runs)
    return [_renamed(run, name) for run, name in zip(runs, names, strict=True)]


def _expect_overridable(paths: Sequence[Path], overrides: Sequence[str]) -> None:
    """Overrides reach what is run here, so at least one path has to be run.

    Raises:
        UserError: all of them are results.
    """
    if overrides and all(map(_is_result, paths)):
        raise UserError(
            f"{', '.join(overrides)} cannot be set: {' and '.join(map(str, paths))} are results of "
            "runs that are over; compare scenarios to run them with other keys"
        )


def _is_result(path: Path) -> bool:
    return path.suffix == ".json" or path.is_dir()


def _scenario(path: Path, overrides: Sequence[str]) -> LoadedScenario:
    loaded = load_path(path, overrides=overrides, known_faults=FAULTS)
    if not isinstance(loaded, LoadedScenario):
        raise UserError(f"{path} is a sweep; compare takes scenarios and results")
    check_input(loaded)
    return loaded


def _run(path: Path, loaded: LoadedScenario, folder: Path | None) -> Run:
    if folder is not None:
        prepare_folder(folder)
    keep = Keep(traces=False, sides=True)
    outcome = run_scenario(loaded, reproduce=f"python run.py {path}", keep=keep)
    if folder is not None:
        write_outcome(outcome, folder, with_tensors=True)
    sides = sides_of(loaded.scenario.name, outcome)
    tokens = {run.mode: run.batch.hidden_states for run in outcome.runs if run.round == 0}
    return Run(source=path, result=outcome.result, sides=sides, tokens=tokens)


def _read(path: Path) -> Run:
    """A result with the tensors that lie beside it."""
    file = path / "result.json" if path.is_dir() else path
    try:
        result = read_result(file)
    except ResultError as error:
        raise UserError(str(error)) from error
    if result.verdict in (Verdict.FAILED, Verdict.UNSUPPORTED):
        return Run(source=file, result=result, sides={}, tokens={})
    if any(backend.name == JUDGED_TRACE for backend in result.backends.values()):
        raise UserError(
            f"{file}: judged from a trace, of which no tensor is kept beside the result; compare "
            "takes scenarios, and results of runs with --save-tensors all"
        )
    tensors = _tensors(file.with_name("tensors.safetensors"))
    modes = [mode for mode in Mode if f"{mode}/actual/output" in tensors]
    loaded = _loaded(file, result)
    return Run(
        source=file,
        result=result,
        sides={mode: _kept_side(loaded, result, mode, tensors) for mode in modes},
        tokens={mode: tensors[f"{mode}/input/hidden_states"] for mode in modes},
    )


def _tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise UserError(
            f"{file}: not there, so no bit can be compared; run again with --save-tensors all"
        )
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cannot be read as safetensors: {error}") from error


def _loaded(file: Path, result: Result) -> LoadedScenario:
    """The scenario that a result names, for the facts of its layer."""
    try:
        scenario = Scenario.model_validate_json(json.dumps(result.scenario))
        model = resolve_model(scenario.model, file.parent)
    except (ValueError, ModelError) as error:
        raise UserError(f"{file}: its scenario is none of this version: {error}") from error
    return LoadedScenario(path=file, scenario=scenario, model=model, faults=(), notes=())


def _kept_side(
    loaded: LoadedScenario, result: Result, mode: Mode, tensors: Mapping[str, Tensor]
) -> Side:
    """Routes and output, which is what a result keeps."""
    kept = {
        (Stage.ROUTE, "topk_ids"): tensors[f"{mode}/route/topk_ids"],
        (Stage.ROUTE, "topk_weights"): tensors[f"{mode}/route/topk_weights"],
        OUTPUT: tensors[f"{mode}/actual/output"],
    }
    values = {name: tokens_in_order(rows) for name, rows in kept.items()}
    return Side(
        name=result.name,
        mode=mode,
        verdict=result.verdict,
        summary=result.summary,
        forward=CanonicalForward(layer=judged_layer(plan_of(loaded, mode), loaded), values=values),
        distances=distances(
            tensors[f"{mode}/actual/output"],
            tensors[f"{mode}/golden/same_recipe"],
            tensors[f"{mode}/golden/ideal"],
        ),
    )


def _names(one: Run, other: Run) -> tuple[str, str]:
    """What both are called; where it is the same, with a letter."""
    names = one.result.name, other.result.name
    return names if names[0] != names[1] else (f"{names[0]} (A)", f"{names[1]} (B)")


def _renamed(run: Run, name: str) -> Run:
    return replace(run, sides={mode: replace(side, name=name) for mode, side in run.sides.items()})


def _compared(run: Run, name: str) -> ComparedRun:
    return ComparedRun(
        name=name, source=str(run.source), verdict=run.result.verdict, summary=run.result.summary
    )


def _differing_checks(one: Result, other: Result) -> list[CheckDifference]:
    """Checks that both answered, in another way."""
    answers = [
        {(check.name, check.mode): check.verdict for check in result.checks if _answered(check)}
        for result in (one, other)
    ]
    return [
        CheckDifference(name=name, mode=mode, one=verdict, other=answers[1][name, mode])
        for (name, mode), verdict in answers[0].items()
        if answers[1].get((name, mode), verdict) != verdict
    ]


def _answered(check: Check) -> bool:
    return check.verdict is not CheckVerdict.NOT_APPLICABLE


def _key(result: Result, section: str, key: str) -> JsonValue:
    """One key of the scenario behind a result."""
    part = result.scenario.get(section)
    return part.get(key) if isinstance(part, dict) else None


def _why_not(one: Run, other: Run) -> list[str]:
    """What makes two runs incomparable."""
    reasons = [
        f"model.{key}: {one.result.model[key]} and {other.result.model.get(key)}"
        for key in one.result.model
        if one.result.model[key] != other.result.model.get(key)
    ]
    for section, key in _DECIDE_VALUES:
        mine, theirs = (_key(run.result, section, key) for run in (one, other))
        if mine != theirs:
            reasons.append(f"{section}.{key}: {mine} and {theirs}")
    if one.sides and other.sides and not one.sides.keys() & other.sides.keys():
        reasons.append(f"inputs.modes: {', '.join(one.sides)} and {', '.join(other.sides)}")
    if not one.sides and not other.sides:
        reasons.append("neither of them came to an output")
    for mode in one.tokens.keys() & other.tokens.keys():
        given, asked = one.tokens[mode], other.tokens[mode]
        if given.shape != asked.shape:
            reasons.append(f"batch.tokens: {len(given)} and {len(asked)} tokens in mode {mode}")
        elif not torch.equal(given, asked):
            reasons.append(f"the tokens of mode {mode} hold other values")
    return reasons

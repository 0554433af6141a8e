"""A scenario file to a checked scenario, or to every problem in it at once."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from scenarios.command_line import add_injects, apply_sets
from scenarios.document import Document
from scenarios.errors import KeyPath, Problem, ScenarioError, not_one_of
from scenarios.inject import FaultSpec, parse_inject
from scenarios.models import ModelError, MoeModel
from scenarios.resolve import resolve_model
from scenarios.rules import BrokenRule, check_rules
from scenarios.schema import Scenario
from scenarios.validation import Validated, validate
from scenarios.yaml_text import read_file


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedScenario:
    """A scenario that means something, ready to run.

    path      the file it came from
    scenario  every default filled in, every path absolute
    model     the sizes and rules that ``scenario.model`` names
    faults    ``scenario.inject``, read
    notes     rules that were broken but are not enforced here
    stored    folder of tokens and weights that take the place of drawn ones; see ``stored``
    """

    path: Path
    scenario: Scenario
    model: MoeModel
    faults: tuple[FaultSpec, ...]
    notes: tuple[str, ...]
    stored: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedDocument:
    """What came of the values of one scenario.

    loaded    None if anything is wrong
    scenario  what was judged; complete if there are no problems
    model     what it names, if that can be read
    problems  what is wrong with keys and values, each by itself
    refusals  rules that the combination breaks, as far as the right sections let them be judged
    """

    loaded: LoadedScenario | None
    scenario: Scenario
    model: MoeModel | None
    problems: tuple[Problem, ...]
    refusals: tuple[BrokenRule, ...]


def load_scenario(
    path: str | Path,
    *,
    overrides: Sequence[str] = (),
    injects: Sequence[str] = (),
    known_faults: Collection[str] | None = None,
) -> LoadedScenario:
    """Read, complete and check one scenario file.

    Args:
        path: the YAML file.
        overrides: ``a.b=VALUE`` texts as of ``--set``; VALUE is YAML.
        injects: fault texts as of ``--inject``, added to the file's own.
        known_faults: names that exist; None leaves fault names unchecked.

    Raises:
        ScenarioError: with every problem that the readable parts allow to find.
    """
    path = Path(path)
    document = read_file(path)
    apply_sets(document, overrides)
    add_injects(document, injects)
    return load_document(document, path, known_faults=known_faults)


def load_document(
    document: Document, path: Path, *, known_faults: Collection[str] | None = None
) -> LoadedScenario:
    """``load_scenario`` of values that have been read; arguments as of ``check_document``.

    Raises:
        ScenarioError: with every problem that the readable parts allow to find.
    """
    checked = check_document(document, path, known_faults=known_faults)
    if checked.loaded is None:
        refusals = [_refusal(broken, document) for broken in checked.refusals]
        raise ScenarioError(str(path), [*checked.problems, *refusals])
    return checked.loaded


def check_document(
    document: Document, path: Path, *, known_faults: Collection[str] | None = None
) -> CheckedDocument:
    """Complete and check a scenario that has been read.

    Args:
        document: its values, with the place where each was written.
        path: the file they came from; relative paths start at its folder.
        known_faults: names that exist; None leaves fault names unchecked.
    """
    checked = validate(document)
    problems = document.problems + list(checked.problems)
    model = _model(checked, document, path.parent, problems)
    faults = _faults(checked, document, known_faults, problems)
    problems += _missing_files(checked, document, path.parent)
    report = check_rules(checked.scenario, model, checked.sections)
    loaded = None
    if model is not None and not problems and not report.problems:
        scenario = _with_absolute_paths(checked.scenario, path.parent)
        loaded = LoadedScenario(
            path=path, scenario=scenario, model=model, faults=faults, notes=report.notes
        )
    return CheckedDocument(
        loaded=loaded,
        scenario=checked.scenario,
        model=model,
        problems=tuple(problems),
        refusals=report.problems,
    )


def _refusal(broken: BrokenRule, document: Document) -> Problem:
    return document.problem(_key_path(broken.field), broken.refusal)


def _model(
    checked: Validated, document: Document, base_dir: Path, problems: list[Problem]
) -> MoeModel | None:
    if "model" not in checked.sections:
        return None
    try:
        return resolve_model(checked.scenario.model, base_dir)
    except ModelError as error:
        for key, message in error.faults:
            problems.append(document.problem(("model", *_key_path(key)), message))
        return None


def _faults(
    checked: Validated,
    document: Document,
    known: Collection[str] | None,
    problems: list[Problem],
) -> tuple[FaultSpec, ...]:
    faults = []
    texts = checked.scenario.inject if "inject" in checked.sections else ()
    for index, text in enumerate(texts):
        try:
            fault = parse_inject(text)
        except ValueError as error:
            problems.append(document.problem(("inject", index), str(error)))
            continue
        faults.append(fault)
        if known is not None and fault.name not in known:
            reason = not_one_of(fault.name, sorted(known))
            problems.append(document.problem(("inject", index), reason))
    expected = checked.scenario.expect.fault if "expect" in checked.sections else None
    if expected is not None and known is not None and expected not in known:
        reason = not_one_of(expected, sorted(known))
        problems.append(document.problem(("expect", "fault"), reason))
    return tuple(faults)


def _missing_files(checked: Validated, document: Document, base_dir: Path) -> list[Problem]:
    return [
        document.problem(_key_path(key), f"no such file: {base_dir / name}")
        for key, name in _named_files(checked.scenario, checked.sections).items()
        if not _is_there(key, base_dir / name)
    ]


def _is_there(key: str, path: Path) -> bool:
    """A file, or for weights a checkpoint's folder; a missing config.json is reported elsewhere."""
    if key == "model.weights.path":
        return path.exists()
    return key == "model.hf_config" or path.is_file()


def _named_files(scenario: Scenario, sections: Collection[str]) -> dict[str, str]:
    """Key -> file name as written, for each file that the readable sections name."""
    named: dict[str, str | None] = {}
    if "model" in sections:
        named["model.hf_config"] = scenario.model.hf_config
        named["model.weights.path"] = scenario.model.weights.path
    if "inputs" in sections:
        named["inputs.path"] = scenario.inputs.path
    return {key: name for key, name in named.items() if name is not None}


def _with_absolute_paths(scenario: Scenario, base_dir: Path) -> Scenario:
    named = _named_files(scenario, Scenario.model_fields)
    absolute = {key: str((base_dir / name).resolve()) for key, name in named.items()}
    if not absolute:
        return scenario
    raw = scenario.model_dump(mode="json")
    for key, file in absolute.items():
        section = raw
        *parents, last = key.split(".")
        for parent in parents:
            section = section[parent]
        section[last] = file
    return Scenario.model_validate_json(json.dumps(raw))


def _key_path(field: str) -> KeyPath:
    return tuple(field.split(".")) if field else ()

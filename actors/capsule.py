"""A capsule: one folder that holds a failure whole, and its replay.

Tokens and weights are in it as they were, so that the code that drew them may change.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml
from safetensors import SafetensorError

from actors.output import OutputError
from actors.planning import plan_of, unpadded
from actors.results import environment
from actors.shrink import Shrunk
from reports.capsule_record import FILE, Capsule, CapsuleError, parting, read_capsule
from reports.failure import Failure, failure_of
from reports.result import Result
from reports.result_file import write_result
from scenarios.batches import batch_of
from scenarios.changes import values_of
from scenarios.errors import UserError
from scenarios.loader import LoadedScenario
from scenarios.schema import LONGEST_NAME
from scenarios.sources import code_digest
from scenarios.stored import store_batch, store_weights, tokens_file

SCENARIO: Final = "scenario.yaml"
_CONFIG: Final = "config.json"


def write_capsule(shrunk: Shrunk, shrunk_from: str, folder: Path) -> Path:
    """Write the scenario that was found with all that it reads; ``capsule.json`` comes last.

    Args:
        shrunk: by a search.
        shrunk_from: the command that ran the first scenario.
        folder: exists.

    Returns:
        The scenario's file.

    Raises:
        OutputError: a file could not be written.
    """
    loaded, result = shrunk.loaded, shrunk.result
    capsule = Capsule(
        failure=shrunk.failure,
        first_divergence=result.first_divergence,
        shrunk_from=shrunk_from,
        went=shrunk.went,
        candidates=shrunk.tried,
        refused=shrunk.refused,
        ended_by=shrunk.ended_by,
        code=code_digest(),
        environment=environment(),
    )
    scenario = folder / SCENARIO
    try:
        (folder / FILE).unlink(missing_ok=True)
        _store_tensors(loaded, folder)
        text = yaml.safe_dump(_own_values(shrunk, folder), sort_keys=False)
        scenario.write_text(text, encoding="utf-8")
        write_result(capsule, folder / FILE)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"--out {folder}: {error}") from error
    return scenario


def _store_tensors(loaded: LoadedScenario, folder: Path) -> None:
    for mode in loaded.scenario.inputs.modes:
        store_batch(batch_of(loaded, mode), folder, mode)
        weights = unpadded(plan_of(loaded, mode).weights)
        store_weights(weights, loaded.model.n_routed_experts, folder, mode)


def _own_values(shrunk: Shrunk, folder: Path) -> dict[str, Any]:
    """The scenario's values, which name no file outside the folder."""
    values = values_of(shrunk.loaded)
    values["name"] = capsule_name(shrunk.loaded.scenario.name, shrunk.failure)
    values["about"] = f"the smallest found that fails so: {shrunk.failure}"
    values["model"]["weights"] = {"kind": "synthetic"}
    if values["model"]["hf_config"] is not None:
        shutil.copyfile(values["model"]["hf_config"], folder / _CONFIG)
        values["model"]["hf_config"] = _CONFIG
    if values["inputs"]["path"] is not None:
        values["inputs"]["path"] = tokens_file(Path(), "file").name
    return values


def capsule_name(scenario: str, failure: Failure) -> str:
    """The scenario's name and what fails: several capsules of one scenario can run together."""
    words = [scenario, failure.stage or failure.verdict, failure.mistake]
    return "-".join(word for word in words if word)[:LONGEST_NAME]


def with_stored(loaded: LoadedScenario) -> LoadedScenario:
    """The scenario, with the tokens and weights of its capsule if it lies in one."""
    folder = loaded.path.resolve().parent
    return replace(loaded, stored=folder) if (folder / FILE).is_file() else loaded


def held_to_capsule(result: Result, loaded: LoadedScenario) -> Result:
    """The result of a replay: expected if what the capsule holds came out, bit for bit.

    A scenario that lies in no capsule keeps its own result.

    Raises:
        UserError: the capsule cannot be read.
    """
    if loaded.stored is None:
        return result
    try:
        parts = parting(read_capsule(loaded.stored), result, failure_of(result))
    except CapsuleError as error:
        raise UserError(str(error)) from error
    said = f"replay parts from the capsule: {parts}" if parts else "replay as the capsule holds it"
    changed = {"as_expected": not parts, "summary": f"{result.summary}; {said}"}
    return result.model_copy(update=changed)

"""Every shipped file of a recipe agrees, and says what loading made of its weights."""

from pathlib import Path

import pytest

from actors.driver import run_scenario
from reports.result import Result
from scenarios.loader import load_scenario

ROOT = Path(__file__).parents[2] / "scenarios" / "recipes"

# File -> whether loading changes the experts' w13 and w2, and the shared expert's.
CHANGES = {
    "deepseek_v4_mxfp4": {"experts": (False, False), "shared": (True, True)},
    "deepseek_v4_mxfp4_as_fp8": {"experts": (False, False), "shared": (True, True)},
    "fp8_per_tensor": {"experts": (True, False)},
    "gpt_oss_padded": {"experts": (False, False)},
    "kimi_k2": {"experts": (False, False), "shared": (False, False)},
    "kimi_k3_situ": {"experts": (False, False)},
    "mxfp8": {"experts": (False, False), "shared": (False, False)},
}


def test_every_file_of_the_folder_is_run():
    assert [path.stem for path in sorted(ROOT.glob("*.yaml"))] == list(CHANGES)


@pytest.fixture(scope="module", params=CHANGES)
def ran(request) -> tuple[str, Result]:
    path = ROOT / f"{request.param}.yaml"
    loaded = load_scenario(path, overrides=["run.runtime=loopback", "inputs.modes=[random]"])
    return request.param, run_scenario(loaded, asks=False).result


def test_a_recipe_agrees(ran):
    _, result = ran
    assert (result.verdict, result.findings) == ("agree", ())


def test_loading_changes_weights_where_it_rounds_again(ran):
    name, result = ran
    changed = {row.tensor: row.changed_by > 0 for row in result.weights}
    assert changed == {
        f"{group}.{matrix}": is_changed
        for group, both in CHANGES[name].items()
        for matrix, is_changed in zip(("w13", "w2"), both, strict=True)
    }

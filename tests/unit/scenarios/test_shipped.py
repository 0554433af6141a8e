"""The scenario files that come with the project."""

from pathlib import Path

import pytest

from scenarios.loader import load_scenario
from scenarios.paths import expand_paths
from scenarios.support import unsupported_reasons
from scenarios.sweep_file import holds_sweep

FOLDER = Path(__file__).parents[3] / "scenarios"
FILES = [path for path in expand_paths([FOLDER]) if not holds_sweep(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_scenario_is_right_and_runs(path):
    loaded = load_scenario(path)
    assert loaded.scenario.name == path.stem
    assert loaded.scenario.about
    assert unsupported_reasons(loaded.scenario, loaded.model) == []


def test_names_are_unique():
    names = [load_scenario(path).scenario.name for path in FILES]
    assert len(set(names)) == len(names)


def test_ep8_dp_is_the_documented_example():
    loaded = load_scenario(FOLDER / "ep8_dp.yaml")
    scenario, model = loaded.scenario, loaded.model
    assert scenario.batch.tokens == (17, 0, 33, 64, 5, 64, 1, 40)
    assert (scenario.parallel.world_size, scenario.inputs.seed) == (8, 7)
    assert (scenario.moe.recipe, scenario.platform) == ("fp8_block128", "sm100")
    assert (model.hidden_size, model.moe_intermediate_size) == (512, 256)
    assert (model.n_routed_experts, model.num_experts_per_tok) == (32, 6)


def test_kernel_sizes_are_legal_for_every_dispatchers_kernels():
    path = FOLDER / "ep8_dp_kernel_sizes.yaml"
    for dispatcher in ("deepep_normal", "deepep_ll", "deepep_v2", "standard"):
        options = [
            f"moe.dispatcher={dispatcher}",
            "batch.phase=decode",
            "moe.shared_experts=replicated",
        ]
        assert load_scenario(path, overrides=options).notes == ()

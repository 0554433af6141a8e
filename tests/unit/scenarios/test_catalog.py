import pytest

from moe.formats import DispatchFormat, QuantRecipe
from scenarios.catalog import dispatcher_entries, preset_entries, recipe_entries, scenario_entries
from scenarios.errors import ScenarioError
from scenarios.presets import Preset


def names(entries):
    return [entry.name for entry in entries]


def running(entries):
    return [entry.name for entry in entries if entry.runs]


def test_everything_that_can_be_named_is_listed():
    assert names(preset_entries()) == list(Preset)
    assert names(dispatcher_entries()) == list(DispatchFormat)
    assert names(recipe_entries()) == list(QuantRecipe)


def test_every_dispatcher_recipe_and_preset_runs():
    assert running(dispatcher_entries()) == list(DispatchFormat)
    assert running(recipe_entries()) == list(QuantRecipe)
    assert running(preset_entries()) == list(Preset)


def test_a_preset_is_described_by_its_sizes_and_source():
    assert preset_entries()[0].about == (
        "top-6 of 256 experts + 1 shared, H 4096, I 2048, sqrtsoftplus "
        "(deepseek-ai/DeepSeek-V4-Flash config.json)"
    )


def test_a_scenario_entry_says_why_it_does_not_run(written):
    path = written(more="about: on one GPU a rank\nrun: {backends: {transport: deep_ep}}\n")
    (entry,) = scenario_entries([path])
    found = (entry.name, entry.about, len(entry.unsupported))
    assert found == ("small", "on one GPU a rank", 1)


def test_a_wrong_file_cannot_be_listed(written):
    with pytest.raises(ScenarioError):
        scenario_entries([written(("world_size: 2", "world_size: 3"))])

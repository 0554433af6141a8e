"""Scenarios of upstream's own deviations: found where they say, and silent once they are right."""

import re
from functools import cache
from pathlib import Path

import pytest

from actors.driver import run_scenario
from moe.faults import FAULTS
from scenarios.loader import load_scenario

FINDINGS = sorted((Path(__file__).parents[2] / "scenarios" / "findings").glob("*.yaml"))
EVERY_FINDING = pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)


@cache
def run(path, *settings):
    loaded = load_scenario(path, overrides=("run.runtime=loopback", *settings))
    return run_scenario(loaded, asks=False).result


@EVERY_FINDING
def test_a_finding_is_found_at_the_stage_that_it_names(path):
    result = run(path)
    expected = load_scenario(path).scenario.expect
    assert result.as_expected
    assert result.first_divergence.stage == expected.stage


def test_the_page_shows_what_a_finding_prints():
    page = (FINDINGS[0].parents[2] / "docs" / "findings.md").read_text()
    for path in FINDINGS[:2]:  # the others' numbers are held by their stage
        assert f"{path.stem}: {run(path).summary}" in page


@EVERY_FINDING
def test_without_its_fault_the_layer_of_a_finding_agrees(path):
    result = run(path, "inject=[]", "expect=agree")
    assert (result.verdict, result.findings) == ("agree", ())


def test_every_fault_of_upstream_has_a_finding():
    injected = {
        name.partition(":")[0] for p in FINDINGS for name in load_scenario(p).scenario.inject
    }
    of_upstream = {name for name, fault in FAULTS.items() if "sglang-0.5.21" in fault.origin}
    assert of_upstream <= injected


@EVERY_FINDING
def test_a_finding_injects_faults_that_name_the_source_they_were_read_in(path):
    names = [inject.partition(":")[0] for inject in load_scenario(path).scenario.inject]
    assert names
    assert all("sglang-0.5.21" in FAULTS[name].origin for name in names)


def test_situ_comes_out_as_much_too_large_as_from_the_released_kernel():
    (path,) = (path for path in FINDINGS if path.stem == "situ_scales_rounded_up_late")
    said = r"([\d.]+) times their size on average, ([\d.]+) at the farthest"
    size = re.search(said, run(path).first_divergence.detail)
    mean, largest = map(float, size.groups())
    assert mean == pytest.approx(1.437, abs=0.04)  # measured on normal gate and up
    assert largest == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize(
    ("name", "distances"),
    [
        ("bf16_experts_without_clamp", {"activation": 0.077, "glue_out": 0.043}),
        ("compact_without_alpha", {"activation": 0.374, "glue_out": 0.366}),
    ],
)
def test_experts_of_another_activation_are_as_far_off_as_their_finding_says(name, distances):
    result = run(next(path for path in FINDINGS if path.stem == name))
    found = {row.stage: row.run_to_same_recipe for row in result.golden if row.stage in distances}
    assert found == pytest.approx(distances, abs=0.001)

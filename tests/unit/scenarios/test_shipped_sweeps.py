"""The sweeps that come with the project: what their names promise, held against the files."""

from pathlib import Path

import pytest

from scenarios.support import unsupported_reasons
from scenarios.sweep import ExpandedSweep, load_path
from scenarios.sweep_file import read_sweep
from scenarios.yaml_text import read_file

FOLDER = Path(__file__).parents[3] / "scenarios" / "sweeps"
SMALL = ("smoke", "edges", "topologies")


@pytest.fixture(scope="module")
def loaded():
    return {name: load_path(FOLDER / f"{name}.yaml") for name in SMALL}


@pytest.mark.parametrize("name", SMALL)
def test_every_value_has_a_row_and_every_row_runs(loaded, name):
    sweep = loaded[name]
    assert isinstance(sweep, ExpandedSweep)
    assert sweep.values_without_a_row() == []
    for _, row in sweep.legal:
        assert unsupported_reasons(row.scenario, row.model) == []
        assert row.scenario.run.runtime == "loopback"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sweep_is_called_like_its_file(path):
    sweep = read_sweep(read_file(path), path)
    assert (sweep.name, bool(sweep.about)) == (path.stem, True)


def test_edges_has_every_count_around_a_tile_and_an_idle_rank_with_every_dispatcher(loaded):
    rows = [
        (row.scenario.moe.dispatcher, row.scenario.batch.tokens) for _, row in loaded["edges"].legal
    ]
    for dispatcher in ("standard", "flashinfer", "deepep_normal", "deepep_ll", "deepep_v2"):
        counts = {sum(tokens) for one, tokens in rows if one == dispatcher}
        assert counts >= {0, 1, 127, 128, 129}
        assert any(min(tokens) == 0 < max(tokens) for one, tokens in rows if one == dispatcher)


def test_topologies_has_every_factorisation_of_the_experts_over_up_to_eight_ranks(loaded):
    views = {row.scenario.parallel for _, row in loaded["topologies"].legal}
    splits = {(ep, world // ep) for world in (1, 2, 4, 8) for ep in (1, 2, 4, 8) if ep <= world}
    assert {(view.moe.ep, view.moe.tp) for view in views} == splits

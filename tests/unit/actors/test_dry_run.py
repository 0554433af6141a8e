from pathlib import Path

import pytest

from actors.dry_run import dry_run_lines, expected_seconds
from scenarios.loader import load_scenario
from scenarios.sweep import load_path

SMOKE = Path("scenarios/smoke/ep2_dp.yaml")


def seconds(*overrides):
    return expected_seconds(load_scenario(SMOKE, overrides=["run.runtime=loopback", *overrides]))


def test_what_does_not_run_takes_no_time():
    assert seconds("run.device=cuda") == 0.0


@pytest.mark.parametrize(
    "more",
    ["batch.tokens=[500, 300]", "run.rounds=3", "model.overrides.n_routed_experts=64"],
)
def test_more_work_is_expected_to_take_longer(more):
    assert seconds(more) > seconds()


def test_ranks_of_ray_are_expected_to_take_seconds_to_start():
    assert seconds("run.runtime=ray") > seconds() + 2


def test_a_note_that_many_rows_share_is_said_once():
    path = Path("scenarios/sweeps/dispatch_layout.yaml")
    sets = ["topology=dp_ep", "moe.dispatcher=deepep_ll", "platform=sm90"]
    lines = list(dry_run_lines([load_path(path, overrides=sets)]))
    (note,) = [line for line in lines if "note:" in line]
    assert note.startswith("  note: in 4 rows: model: hidden_size(256) is none of deepep_ll's ")

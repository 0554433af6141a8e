"""A capsule replays from its files alone, bit for bit, and says so if it does not."""

from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from actors.capsule import capsule_name, write_capsule
from actors.driver import run_scenario
from actors.session import Session, unless_expected
from actors.shrink import Shrunk
from moe.formats import Stage
from moe.mistakes import Mistake
from reports.failure import Failure, failure_of
from reports.record import Verdict
from scenarios.errors import UserError
from scenarios.schema import checked_name
from scenarios.stored import tokens_file, weights_file

SMALL = (
    "model.overrides.hidden_size=128",
    "model.overrides.n_routed_experts=4",
    "model.overrides.num_experts_per_tok=2",
)


@pytest.fixture(scope="module", params=["exact", "random"])
def folder(request, load, tmp_path_factory) -> Path:
    """A capsule of one mode, of a run that was not shrunk."""
    loaded = load(*SMALL, f"inputs.modes=[{request.param}]", inject=("partial_dropped",))
    result = run_scenario(loaded, asks=False).result
    failure = failure_of(result)
    assert failure is not None
    made = tmp_path_factory.mktemp("capsule")
    shrunk = Shrunk(
        loaded=loaded,
        result=result,
        failure=failure,
        went=(),
        tried=1,
        refused=0,
        seconds=0.0,
    )
    write_capsule(shrunk, "python run.py first", made)
    return made


def replayed(folder: Path, out: Path, *overrides: str):
    session = Session(overrides=overrides)
    (loaded,) = session.load([str(folder)])
    return session.run(loaded, out), loaded


def mode_of(folder: Path) -> str:
    (mode,) = yaml.safe_load((folder / "scenario.yaml").read_text())["inputs"]["modes"]
    return mode


def changed(file: Path, name: str) -> dict:
    tensors = load_file(file)
    tensors[name] = tensors[name] * 0
    return tensors


def test_a_capsule_replays_as_expected(folder, tmp_path):
    result, _ = replayed(folder, tmp_path)
    assert result.as_expected
    assert result.summary.endswith("; replay as the capsule holds it")


def test_what_is_drawn_has_no_part_in_a_replay(folder, tmp_path):
    result, _ = replayed(folder, tmp_path, "inputs.seed=1234")
    assert result.as_expected, result.summary


def test_a_capsule_of_other_tokens_parts(folder, tmp_path):
    file = tokens_file(folder, mode_of(folder))
    before = load_file(file)
    save_file(changed(file, "hidden_states"), file)
    result, loaded = replayed(folder, tmp_path)
    save_file(before, file)
    assert not result.as_expected
    assert "; replay parts from the capsule: " in result.summary
    assert unless_expected(result, loaded) == ""


def test_a_capsule_of_other_sizes_is_refused(folder):
    with pytest.raises(UserError, match=r"hidden_states is .*; the scenario wants"):
        Session(overrides=("batch.tokens=[5, 4]",)).load([str(folder)])


def test_a_capsule_without_its_weights_is_refused(folder, tmp_path):
    file = weights_file(folder, mode_of(folder))
    file.rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"weights_.*cannot be read"):
        Session().load([str(folder)])
    (tmp_path / "away").rename(file)


def test_a_capsule_names_no_file_outside(folder):
    assert "/" not in (folder / "scenario.yaml").read_text().replace("/ ", "")


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        (
            Failure(
                verdict=Verdict.DISCREPANCY, stage=Stage.COMBINE, mistake=Mistake.PARTIAL_MISSING
            ),
            "ep2_dp-combine-partial_missing",
        ),
        (Failure(verdict=Verdict.FAILED, cause="died"), "ep2_dp-failed"),
    ],
)
def test_capsules_of_one_scenario_are_named_by_what_fails(failure, name):
    assert capsule_name("ep2_dp", failure) == name


def test_a_capsule_of_a_long_name_still_has_a_name():
    failure = Failure(verdict=Verdict.FAILED, stage=Stage.GEMM1)
    assert checked_name(capsule_name("x" * 100, failure)) == "x" * 100

"""What a run leaves on disk: names, shapes, dtypes and the global token order."""

import pytest
import torch
from safetensors.torch import load_file

from actors.driver import run_scenario
from actors.output import OutputError, default_folder, named_tensors, prepare_folder, write_outcome
from reports.result import read_result

NAMES = {
    "input/hidden_states": ((8, 256), torch.bfloat16),
    "route/topk_ids": ((8, 6), torch.int32),
    "route/topk_weights": ((8, 6), torch.float32),
    "golden/ideal": ((8, 256), torch.float64),
    "golden/same_recipe": ((8, 256), torch.float64),
    "actual/output": ((8, 256), torch.bfloat16),
}


@pytest.fixture(scope="module")
def outcome(load):
    return run_scenario(load())


def test_tensors_have_the_published_names_shapes_and_dtypes(outcome, tmp_path):
    write_outcome(outcome, tmp_path, with_tensors=True)
    tensors = load_file(tmp_path / "tensors.safetensors")
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert found == {f"random/{name}": value for name, value in NAMES.items()}


def test_actual_and_golden_rows_stand_in_the_same_order(outcome):
    """Row by row the run is nearest to its own golden row, so no row is exchanged."""
    tensors = named_tensors(outcome.runs)
    actual = tensors["random/actual/output"].double()
    for golden in ("ideal", "same_recipe"):
        distance = torch.cdist(actual, tensors[f"random/golden/{golden}"])
        assert distance.argmin(dim=1).tolist() == list(range(8))


def test_another_split_of_the_same_tokens_leaves_the_same_input_and_routes(outcome, load):
    here = named_tensors(outcome.runs)
    there = named_tensors(run_scenario(load("batch.tokens=[1, 7]")).runs)
    for name in ("input/hidden_states", "route/topk_ids", "golden/ideal"):
        assert torch.equal(here[f"random/{name}"], there[f"random/{name}"])


def test_without_tokens_the_tensors_are_empty(load, tmp_path):
    write_outcome(run_scenario(load("batch.tokens=[0, 0]")), tmp_path, with_tensors=True)
    tensors = load_file(tmp_path / "tensors.safetensors")
    assert {tuple(tensor.shape) for tensor in tensors.values()} == {(0, 256), (0, 6)}


def test_the_written_result_reads_back_equal(outcome, tmp_path):
    write_outcome(outcome, tmp_path, with_tensors=False)
    assert read_result(tmp_path / "result.json") == outcome.result
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "result.json"]


def test_a_failed_run_leaves_no_tensors(load, tmp_path):
    write_outcome(run_scenario(load(inject=("rank_raises",))), tmp_path, with_tensors=True)
    assert not (tmp_path / "tensors.safetensors").exists()


def test_tensors_of_an_earlier_run_do_not_outlive_it(outcome, tmp_path):
    write_outcome(outcome, tmp_path, with_tensors=True)
    write_outcome(outcome, tmp_path, with_tensors=False)
    assert not (tmp_path / "tensors.safetensors").exists()


def test_a_folder_is_made_with_its_parents_and_left_empty(tmp_path):
    prepare_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(OutputError, match=r"--out .*taken: "):
        prepare_folder(tmp_path / "taken")


def test_the_default_folder_ends_with_the_scenarios_name():
    folder = default_folder("ep2_dp")
    assert (folder.parent.name, folder.name.endswith("-ep2_dp")) == ("runs", True)

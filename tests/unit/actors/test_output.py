"""What a run leaves on disk: names, shapes, dtypes and the global token order."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from actors.driver import run_scenario
from actors.output import OutputError, default_folder, named_tensors, prepare_folder, write_outcome
from moe.formats import Stage
from reports.result_file import read_result

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


CP4 = (
    "moe.dispatcher=standard",
    "moe.recipe=bf16",
    "parallel={world_size: 4, attention: {dp: 1, cp: 4, cp_split: %s}, moe: {ep: 4}}",
    "batch.tokens=[13]",
)


@pytest.fixture(scope="module")
def of_split(load):
    """Tensors of a sequence of 13 tokens over four context-parallel ranks, and who held which."""

    @cache
    def run(split):
        settings = [setting % split if "%s" in setting else setting for setting in CP4]
        return run_scenario(load(*settings)).runs

    return run


def test_a_zigzag_split_is_undone_in_every_tensor(of_split):
    """13 tokens are 5 blocks of 2, then 3 of 1: rank 0 holds blocks 0 and 7, rank 1 1 and 6."""
    tensors = named_tensors(of_split("zigzag"))
    (run,) = of_split("zigzag")
    rows = [report.trace[Stage.GLUE_OUT]["hidden_states"] for report in run.reports]
    sequence = tensors["random/actual/output"]
    assert torch.equal(sequence[[0, 1, 12]], rows[0][[0, 1, 2]])
    assert torch.equal(sequence[[2, 3, 11]], rows[1][[0, 1, 2]])
    assert torch.equal(sequence[[4, 5, 10]], rows[2][[0, 1, 2]])
    assert torch.equal(sequence[[6, 7, 8, 9]], rows[3])


@pytest.mark.parametrize("name", NAMES)
def test_how_a_sequence_was_split_changes_no_tensor(of_split, name):
    zigzag, contiguous = (named_tensors(of_split(s)) for s in ("zigzag", "contiguous"))
    assert torch.equal(zigzag[f"random/{name}"], contiguous[f"random/{name}"])


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

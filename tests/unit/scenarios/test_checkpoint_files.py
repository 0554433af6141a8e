import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scenarios.checkpoint_files import (
    CheckpointError,
    StoredTensor,
    TensorProblem,
    TensorReader,
    stored_tensors,
    tensor_files,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "y": torch.zeros(3).half()}, path)
    return path


def write_index(folder, content, name="m.safetensors.index.json"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def message(path):
    with pytest.raises(CheckpointError) as caught:
        tensor_files(path)
    (problem,) = caught.value.problems
    return problem.message


def test_a_file_holds_its_own_tensors(file):
    assert tensor_files(file) == {"x": file, "y": file}


def test_a_directory_with_one_file_is_that_file(file, tmp_path):
    assert tensor_files(tmp_path) == {"x": file, "y": file}


def test_the_index_of_a_directory_goes_before_its_files(file, tmp_path):
    write_index(tmp_path, {"weight_map": {"x": "a.safetensors"}})
    assert tensor_files(tmp_path) == {"x": file}


def test_files_of_an_index_stand_beside_it_and_need_not_exist(tmp_path):
    index = write_index(tmp_path, {"weight_map": {"x": "gone.safetensors"}})
    assert tensor_files(index) == {"x": tmp_path / "gone.safetensors"}


def test_a_directory_with_several_files_and_no_index_lists_them(file, tmp_path):
    save_file({"z": torch.zeros(1)}, tmp_path / "b.safetensors")
    assert message(tmp_path) == (
        "holds several *.safetensors, name one: a.safetensors, b.safetensors"
    )


def test_an_empty_directory_is_refused(tmp_path):
    assert message(tmp_path) == "holds no *.safetensors and no *.safetensors.index.json"


@pytest.mark.parametrize("name", ["weights.bin", "weights.pt", "weights.pkl", "config.json"])
def test_other_kinds_of_file_are_refused_unread(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"x": 1}))
    assert message(path) == (
        "wanted *.safetensors, *.safetensors.index.json, or a directory with one"
    )


def test_a_missing_file_is_refused(tmp_path):
    assert message(tmp_path / "no.safetensors").startswith("cannot be read as safetensors: ")


def test_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"\xff" * 64)
    assert message(path).startswith("cannot be read as safetensors: ")


@pytest.mark.parametrize("content", [b"{", b"", b"\xff"], ids=["cut", "empty", "no utf-8"])
def test_an_index_that_is_no_json_is_refused(tmp_path, content):
    assert message(write_index(tmp_path, content)).startswith("cannot be read as JSON: ")


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}, {"weight_map": {"x": 1}}], ids=str)
def test_an_index_without_a_weight_map_is_refused(tmp_path, content):
    assert message(write_index(tmp_path, content)) == (
        "wanted an object weight_map of tensor names to file names"
    )


def test_headers_give_shape_and_dtype(file):
    stored, problems = stored_tensors({"y": file})
    assert stored == {"y": StoredTensor(file=str(file), name="y", shape=(3,), dtype="F16")}
    assert problems == []


def test_headers_of_a_wrong_index_are_a_problem_each(file, tmp_path):
    _, problems = stored_tensors({"z": file, "x": tmp_path / "gone.safetensors"})
    assert [(Path(p.file).name, p.tensor, p.message.split(":")[0]) for p in problems] == [
        ("a.safetensors", "z", "the index puts it here; it is not"),
        ("gone.safetensors", "", "cannot be read as safetensors"),
    ]


def test_a_reader_reads_one_entry_of_the_first_axis(file):
    stored, _ = stored_tensors({"x": file})
    with TensorReader() as reader:
        assert reader.read(stored["x"], 1).tolist() == [3.0, 4.0]


def test_a_tensor_that_has_gone_is_an_error_that_names_it(file):
    gone = StoredTensor(file=str(file), name="z", shape=(1,), dtype="F32")
    with TensorReader() as reader, pytest.raises(CheckpointError, match="z: cannot be read"):
        reader.read(gone)


def test_the_same_problem_of_many_experts_is_one_line():
    names = [f"p.experts.{expert}.w1.weight" for expert in range(3)]
    error = CheckpointError("c", [TensorProblem("f", name, "missing") for name in names])
    assert str(error) == (
        "c: 3 problem(s)\n  f: p.experts.0.w1.weight: missing (and 2 more like it)"
    )


def test_an_error_arrives_whole_from_another_process():
    error = CheckpointError("c", [TensorProblem("f", "t", "missing")])
    arrived = pickle.loads(pickle.dumps(error))
    assert (str(arrived), arrived.problems) == (str(error), error.problems)

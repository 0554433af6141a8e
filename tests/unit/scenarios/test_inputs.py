"""Tokens that depend on the scenario alone, and files that do not fit."""

import pytest
import torch
from safetensors.torch import save_file

from moe.batch import Batch
from scenarios.errors import InputError
from scenarios.inputs import (
    captured_hidden_states,
    captured_input_ids,
    deal,
    random_hidden_states,
)
from topology.layout import ParallelLayout
from topology.sync import SyncOptions, sync_plan


@pytest.mark.parametrize("tokens", [[12], [5, 7], [0, 12, 0], [3, 3, 3, 3]], ids=str)
def test_any_dealing_gives_the_same_global_tokens(tokens):
    batch = Batch(hidden_states=random_hidden_states(7, 12, 256))
    layout = ParallelLayout(attn_dp=len(tokens), ep=len(tokens))
    dealt = deal(batch, sync_plan(layout, tokens, a2a=True, extend=True, options=SyncOptions()))
    assert [len(given.hidden_states) for given in dealt] == tokens
    assert torch.equal(torch.cat([given.hidden_states for given in dealt]), batch.hidden_states)


def test_tokens_are_bf16_with_unit_spread():
    rows = random_hidden_states(7, 200, 256)
    assert (rows.shape, rows.dtype) == ((200, 256), torch.bfloat16)
    assert rows.to(torch.float64).std().item() == pytest.approx(1.0, rel=0.02)


def test_another_seed_draws_other_tokens():
    assert not torch.equal(random_hidden_states(7, 4, 256), random_hidden_states(8, 4, 256))


def test_captured_tokens_are_read_as_they_are(tmp_path):
    rows = random_hidden_states(7, 3, 8)
    save_file({"hidden_states": rows, "input_ids": torch.arange(3)}, tmp_path / "c.safetensors")
    assert torch.equal(captured_hidden_states(tmp_path / "c.safetensors", 3, 8), rows)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"x": torch.zeros(3, 8), "y": torch.zeros(1)},
            "no tensor hidden_states; it holds x, y",
        ),
        (
            {"hidden_states": torch.zeros(3, 4).bfloat16()},
            r"hidden_states is \[3, 4\]; batch.tokens and the model want \[3, 8\]",
        ),
        (
            {"hidden_states": torch.zeros(2, 8).bfloat16()},
            r"hidden_states is \[2, 8\]; batch.tokens and the model want \[3, 8\]",
        ),
        ({"hidden_states": torch.zeros(3, 8)}, "hidden_states is torch.float32; bf16 is wanted"),
        (
            {"hidden_states": torch.tensor([[0.0] * 8, [torch.nan] * 8, [0.0] * 8]).bfloat16()},
            "token 1 of hidden_states holds NaN or infinity",
        ),
    ],
    ids=["name", "width", "tokens", "dtype", "nan"],
)
def test_a_captured_file_that_does_not_fit_is_refused(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "captured.safetensors")
    with pytest.raises(InputError, match=rf"captured.safetensors: {message}"):
        captured_hidden_states(tmp_path / "captured.safetensors", 3, 8)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.safetensors: cannot be read as safetensors"):
        captured_hidden_states(tmp_path / "nowhere.safetensors", 3, 8)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are no tensors", encoding="utf-8")
    with pytest.raises(InputError, match=r"notes.txt: cannot be read as safetensors"):
        captured_hidden_states(path, 3, 8)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([1, 2]), r"input_ids is \[2\] torch.int64; \[3\] integers are wanted"),
        (torch.zeros(3), r"input_ids is \[3\] torch.float32; \[3\] integers are wanted"),
        (torch.tensor([1, 9, 2]), "token 1 has id 9 of 9"),
        (torch.tensor([1, 2, -1]), "token 2 has id -1 of 9"),
    ],
    ids=["too few", "no integers", "too large", "negative"],
)
def test_captured_ids_that_do_not_fit_are_refused(tmp_path, ids, message):
    save_file({"input_ids": ids}, tmp_path / "captured.safetensors")
    with pytest.raises(InputError, match=message):
        captured_input_ids(tmp_path / "captured.safetensors", 3, 9)


def test_captured_ids_come_back_as_int64(tmp_path):
    save_file({"input_ids": torch.tensor([1, 8, 0], dtype=torch.int32)}, tmp_path / "c.safetensors")
    ids = captured_input_ids(tmp_path / "c.safetensors", 3, 9)
    assert (ids.tolist(), ids.dtype) == ([1, 8, 0], torch.int64)

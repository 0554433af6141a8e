"""The router's own slips: an expert twice, scores that are none, weights of others, of bf16."""

import pytest
import torch

from moe.formats import Stage
from tests.verdict.diagnoses import diagnosed, named

RANK, TOKEN_ROW = 2, 5


def routed(run, **tensors):
    """Of the first of them, with that row of each replaced."""
    changed = {}
    for name, row in tensors.items():
        changed[name] = run.tensor(Stage.ROUTE, RANK, name).clone()
        changed[name][TOKEN_ROW] = row
    return diagnosed(run, Stage.ROUTE, RANK, changed)


def ids_of(run):
    return run.tensor(Stage.ROUTE, RANK, "topk_ids")[TOKEN_ROW].clone()


def test_an_expert_in_two_slots_is_named_with_both(clean_ue8m0):
    ids = ids_of(clean_ue8m0)
    lost, ids[2] = int(ids[2]), ids[0]
    found = routed(clean_ue8m0, topk_ids=ids)
    assert named(found) == ("expert_choice", "low")  # one id, which may be another's by luck
    assert found.words.endswith(f"has expert {int(ids[0])} in slots [0, 2], due {lost} in slot 2")


def test_an_expert_in_two_slots_beside_another_wrong_one_is_not_explained(clean_ue8m0):
    ids = ids_of(clean_ue8m0)
    missing = next(expert for expert in range(8) if expert not in ids.tolist())
    ids[2], ids[3] = ids[0], missing
    assert named(routed(clean_ue8m0, topk_ids=ids)) == (None, "none")


def test_weights_of_the_experts_due_where_one_stands_twice_are_no_rule_of_their_own(clean_ue8m0):
    weights = clean_ue8m0.tensor(Stage.ROUTE, RANK, "topk_weights")[TOKEN_ROW]
    ids = ids_of(clean_ue8m0)
    ids[1] = ids[0]
    found = routed(clean_ue8m0, topk_weights=weights, topk_ids=ids)
    assert named(found) == ("expert_choice", "high")
    assert found.words.startswith("weights of the experts due, not of those chosen")


@pytest.mark.parametrize("first", ["logits", "topk_weights"])
def test_scores_that_are_no_numbers_have_no_expert(clean_ue8m0, first):
    tensors = {"logits": torch.nan, "topk_weights": torch.nan, "topk_ids": -1}
    ordered = {first: tensors.pop(first), **tensors}
    found = routed(clean_ue8m0, **ordered)
    assert named(found) == ("routes_lost", "high")
    assert "are no numbers, so no expert wins" in found.words


def test_weights_of_no_route_are_nothing_divided_by_nothing(clean_ue8m0):
    found = routed(clean_ue8m0, topk_weights=torch.nan, topk_ids=-1)
    assert named(found) == ("topk_weights", "high")
    assert found.words.endswith("which has no route, are 0 divided by their sum, 0")


def test_weights_that_are_no_numbers_beside_chosen_experts_are_not_explained(clean_ue8m0):
    assert named(routed(clean_ue8m0, topk_weights=torch.nan)) == (None, "none")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_rounded_to_bf16_are_named_and_to_another_dtype_are_not(clean_ue8m0, dtype):
    weights = clean_ue8m0.tensor(Stage.DISPATCH, RANK, "topk_weights")
    rounded = weights.to(dtype).to(torch.float32)
    found = diagnosed(clean_ue8m0, Stage.DISPATCH, RANK, {"topk_weights": rounded})
    is_named = dtype is torch.bfloat16
    assert named(found) == (("topk_weights", "high") if is_named else (None, "none"))


def test_experts_of_another_entry_name_it(clean_layout):
    run = clean_layout("hash_layer")
    table = run.tensor(Stage.WEIGHTS, 1, "tid2eid")
    ids = run.tensor(Stage.ROUTE, 1, "topk_ids").clone()
    other = next(row for row in range(len(table)) if not torch.equal(table[row], ids[0].long()))
    ids[0] = table[other]
    found = diagnosed(run, Stage.ROUTE, 1, {"topk_ids": ids})
    assert named(found) == ("expert_choice", "low")
    assert f"has those of id {other}" in found.words

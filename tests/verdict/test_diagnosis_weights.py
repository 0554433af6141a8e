"""Prepared weights that are wrong in one slot: what is in it is named, noise is not."""

import pytest
import torch

from moe.formats import Stage
from reports.verdict.judge import Judge
from tests.verdict.diagnoses import diagnosed, named

RANK = 1


def of_weights(run, **tensors):
    """The diagnosis of one changed matrix, by a judge that has not compared weights yet."""
    named_so = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return diagnosed(run, Stage.WEIGHTS, RANK, named_so, judge=Judge(run.resolved.judged))


def matrices(run, name="w13"):
    held = run.traces[RANK][Stage.WEIGHTS]
    return held[f"experts.{name}.values"], held.get(f"experts.{name}.scale")


def in_slot(tensor, slot, change):
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    cells = copy.view(torch.uint8) if copy.element_size() == 1 else copy
    cells[slot] = change(cells)
    return copy


def test_a_slot_with_the_next_slots_expert_names_it(clean):
    values, scale = matrices(clean)
    changed = {"experts__w13__values": in_slot(values, 0, lambda cells: cells[1])}
    if scale is not None:
        changed["experts__w13__scale"] = in_slot(scale, 0, lambda cells: cells[1])
    found = of_weights(clean, **changed)
    first, second, *_ = clean.resolved.judged.local_experts(RANK)
    assert named(found) == ("wrong_expert", "high")
    assert found.words == f"w13 of expert {first}: the slot holds expert {second}'s weights"


def test_rows_that_take_turns_are_named_whatever_the_recipe(clean):
    values, scale = matrices(clean)
    order = torch.arange(values.shape[1]).view(-1, 2).T.flatten()
    changed = {"experts__w13__values": in_slot(values, 0, lambda cells: cells[0, order])}
    if scale is not None and scale.dtype == torch.int32:
        changed["experts__w13__scale"] = in_slot(scale, 0, lambda cells: cells[0, order])
    assert named(of_weights(clean, **changed)) == ("gate_up_swapped", "high")


def test_rows_that_are_shuffled_are_not_explained(clean):
    values, scale = matrices(clean)
    order = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(0))
    changed = {"experts__w13__values": in_slot(values, 0, lambda cells: cells[0, order])}
    if scale is not None and scale.dtype == torch.int32:
        changed["experts__w13__scale"] = in_slot(scale, 0, lambda cells: cells[0, order])
    assert named(of_weights(clean, **changed)) == (None, "none")


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_the_scales_of_the_next_slot_name_it(clean_fp32, name):
    _, scale = matrices(clean_fp32, name)
    stale = in_slot(scale, 0, lambda cells: cells[1])
    found = of_weights(clean_fp32, **{f"experts__{name}__scale": stale})
    second = clean_fp32.resolved.judged.local_experts(RANK)[1]
    assert found.mistake == "scale_donor"
    assert f"under the scales of slot 1, expert {second}" in found.words


def test_a_byte_of_exponents_that_is_one_higher_is_named(clean_ue8m0):
    _, scale = matrices(clean_ue8m0)
    raised = in_slot(scale, 0, lambda cells: cells[0] + 1)
    found = of_weights(clean_ue8m0, experts__w13__scale=raised)
    assert named(found) == ("scale_exponent", "low")  # two blocks, with one step
    assert "every wrong scale is 2 times what is due; blocks 0 of" in found.words


def test_one_changed_code_is_not_explained(clean_ue8m0):
    values, _ = matrices(clean_ue8m0)
    spoiled = in_slot(values, 0, lambda cells: cells[0] ^ (torch.arange(256) == 7).to(torch.uint8))
    assert named(of_weights(clean_ue8m0, experts__w13__values=spoiled)) == (None, "none")

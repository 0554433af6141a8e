"""Codes of an activation that nobody stored: silent when right, exact when not."""

import pytest
import torch

from moe.formats import Stage
from tests.verdict.captured_runs import judged_alone, kept, replaced

LAYOUTS_WITH_SCALES = ["masked_max_len", "tp_ep_all_to_all", "dp_tp_all_reduce"]
NAMES = ("hidden_states", "hidden_states_scale")


def without_activation(stage, name):
    return (stage, name) != (Stage.ACTIVATION, "activation")


@pytest.fixture(params=LAYOUTS_WITH_SCALES)
def run(clean_layout, request):
    return clean_layout(request.param)


def with_changed_row(run, name, change):
    """The traces without the activation, one row of a route on rank 0 changed."""
    tensor = run.tensor(Stage.ACTIVATION, 0, name)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    row = run.route(0).row
    cells = copy[row // copy.shape[1], row % copy.shape[1]] if copy.dim() == 3 else copy[row]
    change(cells)
    traces = replaced(run.traces, 0, Stage.ACTIVATION, name, copy)
    return judged_alone(run, kept(traces, without_activation)).ledger.deviations


def test_a_clean_activation_that_nobody_stored_has_no_deviation(run):
    judgement = judged_alone(run, kept(run.traces, without_activation))
    assert judgement.ledger.deviations == []
    assert (Stage.ACTIVATION, 0) in judgement.ledger.worst


def test_a_code_two_steps_off_is_objected_to(run):
    def change(cells):
        at = int(cells.float().abs().argmax())
        cells.view(torch.uint8)[at] -= 2

    first = with_changed_row(run, "hidden_states", change)[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.ACTIVATION, 0, "hidden_states")


def test_a_scale_of_twice_the_size_is_objected_to(run):
    def change(cells):
        if cells.dtype == torch.int32:
            cells += 1  # the exponent of the first group
        else:
            cells *= 2

    deviations = with_changed_row(run, "hidden_states_scale", change)
    of_scale = [one for one in deviations if one.tensor == "hidden_states_scale"]
    assert of_scale[0].stage is Stage.ACTIVATION


def test_another_activation_is_objected_to(run):
    gate_up = run.tensor(Stage.GEMM1, 0, "gate_up")
    swapped = torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1)
    traces = replaced(run.traces, 0, Stage.GEMM1, "gate_up", swapped)
    deviations = judged_alone(run, kept(traces, without_activation)).ledger.deviations
    assert {one.stage for one in deviations} == {Stage.GEMM1, Stage.ACTIVATION}


def test_bf16_values_lie_in_their_band(clean_layout):
    run = clean_layout("pure_tp")
    judgement = judged_alone(run, kept(run.traces, without_activation))
    assert judgement.ledger.deviations == []
    assert judgement.ledger.worst[Stage.ACTIVATION, 0] > 0

"""Prepared weights: one changed value is found on its rank, and later stages use what is there."""

from dataclasses import replace

import pytest
import torch

from moe.formats import Stage
from reports.verdict.judge import Judge

PREPARED = "contract: prepared weights"


def judged(clean, rank, tensors):
    """Deviations by a judge that has not compared these weights yet."""
    traces = clean.changed(Stage.WEIGHTS, rank, tensors)
    return clean.judged(traces, judge=Judge(clean.resolved.judged)).deviations


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_one_changed_expert_weight_is_found(clean, name):
    key, rank = f"experts.{name}.values", clean.last_rank
    values = clean.tensor(Stage.WEIGHTS, rank, key).clone()
    values.view(torch.uint8)[1, 3, 7] ^= 1
    first = judged(clean, rank, {key: values})[0]
    assert (first.check, first.stage, first.rank) == (PREPARED, Stage.WEIGHTS, rank)
    assert first.tensor == f"experts.{name}"
    assert first.expert == int(clean.tensor(Stage.WEIGHTS, rank, "expert_ids")[1])
    assert "1 of " in first.detail


def test_one_changed_weight_scale_is_found(quantised):
    key = "experts.w2.scale"
    scale = quantised.tensor(Stage.WEIGHTS, 0, key).clone()
    scale[0, 0, 0] += 1
    first = judged(quantised, 0, {key: scale})[0]
    assert (first.check, first.rank, first.tensor) == (PREPARED, 0, "experts.w2")


def test_one_changed_shared_weight_is_found(clean):
    values = clean.tensor(Stage.WEIGHTS, 0, "shared.w13.values").clone()
    values.view(torch.uint8)[0, 0, 0] ^= 1
    first = judged(clean, 0, {"shared.w13.values": values})[0]
    assert (first.check, first.rank, first.tensor) == (PREPARED, 0, "shared.w13")


@pytest.mark.parametrize("name", ["gate_weight", "correction_bias"])
def test_one_changed_router_value_is_found(clean, name):
    values = clean.tensor(Stage.WEIGHTS, 0, name).clone()
    values.view(-1)[1] += 1
    first = judged(clean, 0, {name: values})[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.WEIGHTS, 0, name)


def test_experts_of_another_rank_are_named(clean):
    ids = clean.tensor(Stage.WEIGHTS, 0, "expert_ids").flip(0)
    first = judged(clean, 0, {"expert_ids": ids})[0]
    assert (first.check, first.rank, first.tensor) == (PREPARED, 0, "expert_ids")
    assert "holds experts (" in first.detail


def test_a_weight_that_was_changed_and_not_used_is_blamed_on_the_gemm_too(clean):
    """GEMM1 is judged with the weights that the trace holds, not with the golden's."""
    rank, route = clean.last_rank, clean.route(clean.last_rank)
    local = int(clean.tensor(Stage.WEIGHTS, rank, "expert_ids").tolist().index(route.expert))
    key = "experts.w13.values"
    values = clean.tensor(Stage.WEIGHTS, rank, key).clone()
    values.view(torch.uint8)[local] = values.view(torch.uint8)[local].flip(0)
    stages = {one.stage for one in judged(clean, rank, {key: values})}
    assert stages == {Stage.WEIGHTS, Stage.GEMM1}


def test_a_correction_bias_that_was_never_loaded_is_found_on_every_rank(clean):
    traces = [
        replace(
            trace,
            stages={
                **trace.stages,
                Stage.WEIGHTS: {
                    name: tensor
                    for name, tensor in trace[Stage.WEIGHTS].items()
                    if name != "correction_bias"
                },
            },
        )
        for trace in clean.traces
    ]
    found = Judge(clean.resolved.judged).judge(clean.batch, traces, clean.calls)
    missing = [one for one in found.ledger.deviations if one.tensor == "correction_bias"]
    assert [(one.stage, one.rank) for one in missing] == [
        (Stage.WEIGHTS, rank) for rank in range(len(traces))
    ]

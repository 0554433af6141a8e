"""Mistakes that are smaller than a bf16 store, made in a rank's partial sums of a real forward."""

import pytest
import torch
from torch import Tensor

from moe.formats import Stage
from reports.verdict.distribution import DISTRIBUTION
from reports.verdict.stores import STORES
from tests.verdict.clean_runs import CleanRun, run_clean
from tests.verdict.stored_cells import towards_zero

SETTINGS = (
    "model.overrides.hidden_size=512",
    "model.overrides.moe_intermediate_size=128",
    "batch.tokens=[70, 90]",
)


@pytest.fixture(scope="module", name="run")
def _run() -> CleanRun:
    return run_clean(*SETTINGS)


def partial(run: CleanRun, rank: int, gain: float = 1.0, *, running=torch.float32) -> Tensor:
    """[R, H] fp32 weighted sums of a rank's routes, slots ascending, in a sum of some dtype."""
    restore = run.traces[rank][Stage.PRE_PERMUTE]
    outputs = run.tensor(Stage.GEMM2, rank, "output").flatten(0, -2).float()
    index, weights = restore["restore.output_index"], restore["restore.topk_weights"]
    total = torch.zeros(len(index), outputs.shape[1], dtype=running)
    for slot in range(index.shape[1]):
        row = index[:, slot].long()
        term = weights[:, slot, None] * outputs[row.clamp(min=0)]
        total = torch.where((row >= 0)[:, None], (total.float() + term).to(running), total)
    return total.float() * gain


def found(run: CleanRun, rank: int, stored: Tensor):
    traces = run.changed(Stage.POST_PERMUTE, rank, {"partial": stored.to(torch.bfloat16)})
    found = run.judged(traces).deviations
    return [one for one in found if one.stage is Stage.POST_PERMUTE]


def test_the_clean_sum_made_here_is_no_finding(run):
    assert found(run, 1, partial(run, 1)) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gain_of_one_thousandth_on_one_ranks_partials_is_found_there(run, rank):
    deviations = found(run, rank, partial(run, rank, gain=1.001))
    assert {one.rank for one in deviations} == {rank}


@pytest.mark.parametrize("gain", [1 + 2e-5, 1 - 2e-5])
def test_a_gain_of_one_in_fifty_thousand_is_found(run, gain):
    deviations = found(run, 1, partial(run, 1, gain=gain))
    assert {one.check for one in deviations} <= {STORES, DISTRIBUTION}
    assert {one.rank for one in deviations} == {1}


def test_a_store_towards_zero_is_found(run):
    assert found(run, 1, towards_zero(partial(run, 1)))


def test_a_running_sum_in_bf16_is_found(run):
    assert found(run, 1, partial(run, 1, running=torch.bfloat16))


def test_a_small_gain_of_one_expert_is_found_at_that_expert(run):
    rank, expert = 1, run.route(1).expert
    local = run.tensor(Stage.WEIGHTS, rank, "expert_ids").tolist().index(expert)
    outputs = run.tensor(Stage.GEMM2, rank, "output").clone()
    rows = run.tensor(Stage.PRE_PERMUTE, rank, "rows.m_indices") == local
    outputs[rows] = (outputs[rows].float() * 1.01).to(torch.bfloat16)
    deviations = run.judged(run.changed(Stage.GEMM2, rank, {"output": outputs})).deviations
    first = deviations[0]
    assert (first.stage, first.rank, first.expert) == (Stage.GEMM2, rank, expert)

"""Several forwards on the same buffers: which tokens, and what a rerun must repeat."""

import pytest
import torch

from actors.driver import run_scenario
from actors.resolve import resolve
from actors.rounds import batch_of_round
from moe.batch import Batch
from moe.formats import Stage
from moe.trace import RankTrace
from reports.result import CheckVerdict
from reports.verdict.determinism import RERUN
from reports.verdict.judge import Judge
from reports.verdict.ledger import Ledger
from tests.mutation.worlds import load

BATCH = Batch(
    hidden_states=torch.arange(5)[:, None],
    input_ids=torch.arange(5),
    topk_ids=torch.arange(5)[:, None],
    topk_weights=torch.arange(5)[:, None],
)


@pytest.mark.parametrize("number", [0, 2, 4])
def test_every_other_round_has_the_list_itself(number):
    assert batch_of_round(BATCH, number) is BATCH


@pytest.mark.parametrize("number", [1, 3])
def test_the_rounds_between_have_it_rotated_by_half(number):
    batch = batch_of_round(BATCH, number)
    for rows in (batch.hidden_states, batch.input_ids, batch.topk_ids, batch.topk_weights):
        assert rows.flatten().tolist() == [3, 4, 0, 1, 2]


def test_what_is_not_pinned_stays_so():
    batch = batch_of_round(Batch(hidden_states=torch.zeros(3, 1)), 1)
    assert (batch.input_ids, batch.topk_ids, batch.topk_weights) == (None, None, None)


@pytest.fixture(scope="module")
def three_rounds():
    return run_scenario(load("a2a", sets=("run.rounds=3",)))


def determinism(outcome):
    (check,) = [check for check in outcome.result.checks if "determinism" in check.name]
    return check


def test_three_rounds_agree_and_the_third_repeats_the_first(three_rounds):
    assert determinism(three_rounds).verdict is CheckVerdict.AGREE
    assert three_rounds.result.verdict == "agree"


def test_the_second_round_has_other_tokens(three_rounds):
    first, second, third = (run.judgement.output for run in three_rounds.runs)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    assert torch.equal(first.roll(len(first) // 2, dims=0), second)


def test_a_rerun_is_not_asked_about_under_three_rounds():
    check = determinism(run_scenario(load("a2a", sets=("run.rounds=2",))))
    assert check.verdict is CheckVerdict.NOT_APPLICABLE
    assert "under 3" in check.detail


@pytest.mark.parametrize(
    ("stage", "tensor"),
    [
        (Stage.ROUTE, "topk_weights"),
        (Stage.GEMM1, "gate_up"),
        (Stage.COMBINE, "routed"),
        (Stage.GLUE_OUT, "hidden_states"),
    ],
)
def test_a_bit_that_differs_in_the_rerun_names_its_stage_and_rank(three_rounds, stage, tensor):
    run = three_rounds.runs[2]
    traces = [report.trace for report in run.reports]
    row = int(traces[2][Stage.PRE_PERMUTE]["rows.live_rows"][0]) if stage is Stage.GEMM1 else 0
    changed = traces[2][stage][tensor].clone()
    changed[row, 0] = changed[row, 0] * 2 + 1
    stages = {**traces[2].stages, stage: {**traces[2][stage], tensor: changed}}
    again = [*traces]
    again[2] = RankTrace(rank=2, stages=stages)
    ledger = Ledger()
    Judge(resolve(load("a2a")).judged).check_rerun(run.batch, traces, again, ledger)
    (found,) = ledger.deviations
    assert (found.check, found.stage, found.rank, found.tensor) == (RERUN, stage, 2, tensor)

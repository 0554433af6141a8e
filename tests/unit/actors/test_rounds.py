"""Several forwards on the same buffers: which tokens, and what a rerun must repeat."""

import pytest
import torch

from actors.driver import run_scenario
from actors.rounds import batch_of_round
from moe.batch import Batch
from reports.result import CheckVerdict
from reports.verdict.determinism import RERUN
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
def test_the_rounds_between_have_it_rotated_with_one_token_for_every_third(number):
    batch = batch_of_round(BATCH, number)
    for rows in (batch.hidden_states, batch.input_ids, batch.topk_ids, batch.topk_weights):
        assert rows.flatten().tolist() == [3, 4, 0, 3, 2]


def test_what_is_not_pinned_stays_so():
    batch = batch_of_round(Batch(hidden_states=torch.zeros(3, 1)), 1)
    assert (batch.input_ids, batch.topk_ids, batch.topk_weights) == (None, None, None)


@pytest.fixture(scope="module")
def three_rounds():
    return run_scenario(load("a2a", sets=("run.rounds=3",)))


def determinism(outcome):
    (check,) = [check for check in outcome.result.checks if check.name == RERUN]
    return check


def test_three_rounds_agree_and_the_third_repeats_the_first(three_rounds):
    assert determinism(three_rounds).verdict is CheckVerdict.AGREE
    assert three_rounds.result.verdict == "agree"


def test_the_second_round_has_other_tokens(three_rounds):
    first, second, third = (run.judgement.output for run in three_rounds.runs)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)
    order = torch.arange(len(first)).roll(len(first) // 2)
    order[::3] = order[0]
    assert torch.equal(first[order], second)


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_rounds_lack_for_a_rerun_is_run_beside_them(rounds):
    one = run_scenario(load("a2a", sets=(f"run.rounds={rounds}",)))
    assert determinism(one).verdict is CheckVerdict.AGREE
    assert len(one.runs) == rounds

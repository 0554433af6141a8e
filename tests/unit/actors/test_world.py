"""Loopback ranks: a raise or a deadlock is one sentence with rank, stage and cause."""

import os
import pickle
from dataclasses import replace

import pytest
import torch

from actors.resolve import resolve
from actors.world import LoopbackRanks, WorldFailedError
from moe.batch import Batch
from moe.formats import Stage
from scenarios.inputs import deal, random_hidden_states

TOKENS = (2, 3, 0, 4)
SETTINGS = (
    "parallel.world_size=4",
    "parallel.attention.dp=4",
    "parallel.moe.ep=4",
    f"batch.tokens={list(TOKENS)}",
)


def forward(load, *inject, sets=()):
    loaded = load(*SETTINGS, *sets, inject=inject)
    resolved, num_tokens = resolve(loaded), sum(loaded.scenario.batch.tokens)
    with LoopbackRanks(resolved.plan, resolved.faults) as ranks:
        batch = Batch(hidden_states=random_hidden_states(7, num_tokens, 256))
        return ranks.forward(deal(batch, resolved.plan.sync), timeout_s=60)


def failure(load, *inject, sets=()):
    with pytest.raises(WorldFailedError) as caught:
        forward(load, *inject, sets=sets)
    return caught.value


def test_every_rank_comes_back_with_its_own_tokens(load):
    reports = forward(load)
    outputs = [report.trace[Stage.GLUE_OUT]["hidden_states"].shape[0] for report in reports]
    assert outputs == list(TOKENS)


def test_ranks_compute_the_layer_in_use_and_come_back_to_an_earlier_one(load):
    one, other = (resolve(load(*SETTINGS, f"inputs.seed={seed}")).plan for seed in (7, 8))
    given = deal(Batch(hidden_states=random_hidden_states(7, 9, 256)), one.sync)
    with LoopbackRanks(one) as ranks, LoopbackRanks(other) as others:
        want = [world.forward(given, timeout_s=60) for world in (ranks, others)]
        ranks.use(other)
        there = ranks.forward(given, timeout_s=60)
        ranks.use(one)
        back = ranks.forward(given, timeout_s=60)
    assert bits_of(there) == bits_of(want[1]) != bits_of(want[0])
    assert bits_of(back) == bits_of(want[0])


def bits_of(reports):
    outputs = [report.trace[Stage.GLUE_OUT]["hidden_states"] for report in reports]
    return [output.view(torch.int16).tolist() for output in outputs]


def test_all_ranks_live_in_this_process(load):
    resolved = resolve(load(*SETTINGS))
    with LoopbackRanks(resolved.plan) as ranks:
        states = ranks.ranks()
    assert [(s.rank, s.pid, s.device, s.state) for s in states] == [
        (rank, os.getpid(), "cpu", "ok") for rank in range(4)
    ]


def test_a_raise_names_rank_stage_and_cause(load):
    error = failure(load, "rank_raises:rank=2,stage=activation")
    assert str(error).startswith("rank 2 raised in stage activation on ")
    assert str(error).endswith("InjectedError: injected: this rank raises")
    assert [status.state for status in error.ranks] == ["released"] * 2 + ["raised", "released"]


def test_ranks_that_were_let_go_say_how_far_they_were(load):
    error = failure(load, "rank_raises:rank=2,stage=activation")
    stages = [status.stage for status in error.ranks if status.state == "released"]
    assert all(stage.position <= Stage.COMBINE.position for stage in stages)
    assert len(stages) == 3


def test_a_deadlock_blames_the_rank_that_left(load):
    error = failure(load, "combine_skipped:rank=1")
    assert "deadlock in stage combine: rank 1 left without taking part" in str(error)
    assert "ranks 0, 2, 3 wait in all_to_all_v" in str(error)
    assert [status.state for status in error.ranks] == ["released", "hung", "released", "released"]


def test_a_deadlock_blames_the_rank_that_went_on_to_a_later_stage(load):
    halves = ("parallel.attention={dp: 2, tp: 2}", "batch.tokens=[6, 11]")
    error = failure(load, "combine_skipped:rank=1", sets=halves)
    assert "deadlock in stage combine: rank 1 went on without taking part" in str(error)
    assert [(s.state, s.stage) for s in error.ranks if s.rank in {1, 2}] == [
        ("hung", Stage.COMBINE),
        ("released", Stage.COMBINE),
    ]


def test_two_ranks_that_left_are_both_blamed(load):
    error = failure(load, "combine_skipped:rank=1", "combine_skipped:rank=3")
    assert "ranks 1, 3 left without taking part" in str(error)


def test_a_failure_travels_as_a_plain_value(load):
    error = failure(load, "rank_raises")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.ranks) == (str(error), error.ranks)


def test_ranks_that_are_dealt_other_rows_keep_their_weights(load):
    plan, dealt = (
        resolve(load(*SETTINGS, f"batch.tokens={list(tokens)}")).plan
        for tokens in (TOKENS, (0, 0, 9, 0))
    )
    batch = Batch(hidden_states=random_hidden_states(7, 9, 256))
    with LoopbackRanks(plan) as ranks:
        first = ranks.forward(deal(batch, plan.sync), timeout_s=60)
        ranks.use(replace(plan, sync=dealt.sync))
        again = ranks.forward(deal(batch, dealt.sync), timeout_s=60)
    for before, after in zip(first, again, strict=True):
        assert after.trace[Stage.WEIGHTS] is before.trace[Stage.WEIGHTS]
    assert bits_of(again)[2] == [row for rows in bits_of(first) for row in rows]

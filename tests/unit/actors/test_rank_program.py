"""One rank's program: weights once, stages named as it gets there, plans compared first."""

import pytest
import torch

from actors.rank_program import PlanMismatchError, RankProgram
from actors.resolve import resolve
from moe.batch import Batch
from moe.faults import arm
from moe.formats import Stage
from scenarios.inputs import deal, random_hidden_states
from topology.loopback import LoopbackWorld, RankError


@pytest.fixture
def plan(load):
    return resolve(load()).plan


def forward(programs, seed=7):
    sync = programs[0].given_plan.sync
    parts = deal(Batch(hidden_states=random_hidden_states(seed, 8, 256)), sync)
    world = LoopbackWorld(len(programs))
    return world.run(lambda verbs: programs[verbs.rank].forward(parts[verbs.rank], verbs))


def test_every_stage_is_traced_on_every_rank(plan):
    reports = forward([RankProgram(rank, plan) for rank in range(2)])
    assert [set(report.trace.stages) for report in reports] == [set(Stage)] * 2
    assert [report.trace.rank for report in reports] == [0, 1]


def test_the_second_forward_neither_loads_weights_nor_compares_plans(plan):
    programs = [RankProgram(rank, plan) for rank in range(2)]
    first, second = forward(programs), forward(programs, seed=8)
    assert [call.stage for call in first[0].calls] == ["weights", "dispatch", "dispatch", "combine"]
    assert [call.stage for call in second[0].calls] == ["dispatch", "dispatch", "combine"]
    key = "experts.w13.values"
    assert second[0].trace[Stage.WEIGHTS][key] is first[0].trace[Stage.WEIGHTS][key]


def test_a_forward_leaves_nothing_behind_for_the_next(plan):
    programs = [RankProgram(rank, plan) for rank in range(2)]
    first, _, again = forward(programs), forward(programs, seed=8), forward(programs)
    for one, other in zip(first, again, strict=True):
        outputs = [r.trace[Stage.GLUE_OUT]["hidden_states"] for r in (one, other)]
        assert torch.equal(*outputs)


def test_a_fault_acts_again_in_the_second_forward(plan):
    faults = [arm("partial_dropped", {"rank": 1}, (5, 3))]
    programs = [RankProgram(rank, plan, faults) for rank in range(2)]
    clean = [RankProgram(rank, plan) for rank in range(2)]
    for _ in range(2):
        faulty, right = forward(programs)[1], forward(clean)[1]
        routed = [r.trace[Stage.COMBINE]["routed"] for r in (faulty, right)]
        assert (routed[0] != routed[1]).any(dim=1).sum() == 1


def test_another_plan_on_one_rank_is_named_before_any_token_moves(load, plan):
    programs = [RankProgram(0, plan), RankProgram(1, resolve(load("batch.tokens=[4, 4]")).plan)]
    with pytest.raises(RankError) as caught:
        forward(programs)
    assert isinstance(caught.value.cause, PlanMismatchError)
    assert programs[0].stage is Stage.WEIGHTS


def test_a_plan_that_a_fault_edits_does_not_count_as_another_plan(plan):
    faults = [arm("scaling_factor_twice", {"rank": 1}, (5, 3))]
    reports = forward([RankProgram(rank, plan, faults) for rank in range(2)])
    assert len(reports) == 2


def test_progress_names_each_stage_in_order_and_each_collective(plan):
    told = []
    programs = [
        RankProgram(0, plan, progress=lambda stage, op: told.append((stage, op))),
        RankProgram(1, plan),
    ]
    forward(programs)
    stages = [stage for stage, op in told if not op]
    assert list(dict.fromkeys(stages)) == list(Stage)
    assert [(stage, op) for stage, op in told if op] == [
        ("weights", "all_gather_v"),
        ("dispatch", "all_to_all_v"),
        ("dispatch", "all_to_all_v"),
        ("combine", "all_to_all_v"),
    ]

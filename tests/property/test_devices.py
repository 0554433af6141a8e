"""Whatever a rank makes lies where the rank computes, so a GPU needs no other code than a CPU."""

import pytest
import torch

from actors.living import rounds_of
from actors.rank_program import RankProgram
from actors.resolve import resolve
from scenarios.inputs import deal
from tests.mutation.worlds import WORLDS, load
from topology.loopback import LoopbackWorld

ELSEWHERE = torch.device("meta")
"""Tensors without values: one that is made without a device, and read, is an error."""


def forward(programs, given):
    return LoopbackWorld(len(programs)).run(
        lambda verbs: programs[verbs.rank].forward(given[verbs.rank], verbs)
    )


@pytest.mark.parametrize("world", WORLDS)
def test_no_tensor_of_a_forward_is_made_on_the_default_device(world):
    resolved = resolve(load(world))
    plan, one = resolved.plan, rounds_of(load(world))[0]
    given = deal(one.batch, plan.sync, plan.seed)
    programs = [RankProgram(rank, plan) for rank in plan.layout.world]
    forward(programs, given)  # weights are drawn and prepared
    with ELSEWHERE:
        reports = forward(programs, given)
    for report in reports:
        for stage, tensors in report.trace.stages.items():
            for name, tensor in tensors.items():
                assert tensor.device == torch.device("cpu"), f"{stage}/{name}"

"""One rank's weights from those of many equal what that rank would prepare itself."""

import pytest
import torch

from actors.build import rank_weights
from actors.dispatchers import placement
from actors.driver import run_scenario
from actors.joined_weights import joined_weights
from actors.planning import plan_of
from actors.resolve import resolve
from actors.topologies import topologies_of, with_topology
from actors.world import LoopbackRanks
from moe.trace import named_tensors
from reports.verdict.judge import Judge
from scenarios.batches import batch_of
from scenarios.inputs import deal

ANYWHERE = ("moe.placement=shuffled", "moe.redundant_experts=2")


def joined(loaded):
    layer = resolve(loaded).layers["random"]
    batch = batch_of(loaded, "random")
    with LoopbackRanks(layer.plan) as ranks:
        reports = ranks.forward(deal(batch, layer.plan.sync), timeout_s=60)
    subject = Judge(layer.judged).subject(batch, [one.trace for one in reports])
    return joined_weights(subject, placement(one_rank_plan(loaded)).local_experts(0))


def one_rank_plan(loaded):
    return plan_of(with_topology(loaded, next(iter(topologies_of(loaded)))))


def on_one_rank(loaded):
    return rank_weights(one_rank_plan(loaded), 0)


@pytest.mark.parametrize("sets", [(), ANYWHERE], ids=["blocks", "shuffled with replicas"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block128", "mxfp8", "fp8_per_tensor"])
def test_experts_come_together_as_the_one_rank_places_them(load, recipe, sets):
    loaded = load(f"moe.recipe={recipe}", *sets)
    got = dict(named_tensors(joined(loaded)))
    want = dict(named_tensors(on_one_rank(loaded)))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        ours, theirs = (
            one.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            for one in (got[name], tensor)
        )
        assert torch.equal(ours, theirs), name


def test_group_sizes_are_those_of_the_matrices(load):
    loaded = load("moe.recipe=mxfp8")
    got, want = joined(loaded), on_one_rank(loaded)
    for mine, theirs in ((got.experts, want.experts), (got.shared, want.shared)):
        assert (mine.w13.group_size, mine.w2.group_size) == (
            theirs.w13.group_size,
            theirs.w2.group_size,
        )


CUT = (
    "model.overrides.moe_intermediate_size=256",
    "parallel.attention={dp: 1, tp: 2}",
    "parallel.moe={ep: 1, tp: 2}",
    "batch.tokens=[8]",
)


def test_parts_of_matrices_are_not_put_together(load):
    assert joined(load("moe.dispatcher=standard", *CUT)) is None


def test_a_forward_with_replicas_is_compared_with_one_rank(load):
    checks = {check.name: check for check in run_scenario(load(*ANYWHERE)).result.checks}
    assert checks["determinism: topology"].verdict == "agree"

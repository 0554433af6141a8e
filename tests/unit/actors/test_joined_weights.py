"""One rank's weights from those of many equal what that rank would prepare itself."""

import pytest
import torch

from actors.build import rank_weights
from actors.dispatchers import placement
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


def joined(loaded, experts=range(8)):
    layer = resolve(loaded).layers["random"]
    batch = batch_of(loaded, "random")
    with LoopbackRanks(layer.plan) as ranks:
        reports = ranks.forward(deal(batch, layer.plan.sync), timeout_s=60)
    subject = Judge(layer.judged).subject(batch, [one.trace for one in reports])
    return joined_weights(subject, list(experts))


def on_one_rank(loaded):
    one_rank = next(iter(topologies_of(loaded)))
    return rank_weights(plan_of(with_topology(loaded, one_rank)), 0)


@pytest.mark.parametrize("sets", [(), ANYWHERE], ids=["blocks", "shuffled with replicas"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block128", "mxfp8", "fp8_per_tensor"])
def test_all_experts_come_together_in_their_order(load, recipe, sets):
    loaded = load(f"moe.recipe={recipe}", *sets)
    got = dict(named_tensors(joined(loaded)))
    want = dict(named_tensors(on_one_rank(load(f"moe.recipe={recipe}"))))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        ours, theirs = (
            one.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            for one in (got[name], tensor)
        )
        assert torch.equal(ours, theirs), name


def test_a_rank_with_slots_in_another_order_gets_its_own(load):
    loaded = load(*ANYWHERE)
    plan = plan_of(with_topology(loaded, next(iter(topologies_of(loaded)))))
    slots = placement(plan).local_experts(0)
    assert sorted(slots) != list(slots)
    assert len(slots) == 10
    got = joined(loaded, slots).experts.w13.values
    assert torch.equal(got.float(), rank_weights(plan, 0).experts.w13.values.float())


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

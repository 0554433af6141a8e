"""Ranks that share a GPU are named."""

from actors.rank_actor import Joined, shared_gpu


def joined(*homes):
    return [Joined(node=node, pid=1, device=device) for node, device in homes]


def test_ranks_of_one_gpu_are_named_with_it():
    ranks = joined(("a", "H200 1"), ("a", "H200 0"), ("a", "H200 1"))
    told = "ranks 0 and 2 were given one GPU, H200 1 on a; each needs its own"
    assert shared_gpu(ranks) == told


def test_gpus_of_two_nodes_and_cpus_are_not_shared():
    assert shared_gpu(joined(("a", "H200 0"), ("b", "H200 0"), ("a", "cpu"), ("a", "cpu"))) is None

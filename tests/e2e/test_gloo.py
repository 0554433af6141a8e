"""torch.distributed (gloo) against loopback: equal bytes for everything the pipeline sends."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from topology.collectives import CollectiveMismatchError, Collectives
from topology.distributed import DistributedCollectives
from topology.loopback import LoopbackWorld

WORLD = (0, 1, 2)
PAIR = (0, 2)
ROWS = (3, 0, 2)
# SENT[source][destination]: rank 1 sends nothing and receives from both others.
SENT = ((1, 2, 0), (0, 0, 0), (1, 0, 1))

pytestmark = pytest.mark.e2e


def numbered_bytes(rank: int, num_rows: int) -> Tensor:
    """[num_rows, 16] uint8 that name their rank and row; every byte value is a legal payload."""
    return (torch.arange(num_rows * 16, dtype=torch.uint8) + 64 * rank).view(num_rows, 16)


def single_column(rows: Tensor) -> Tensor:
    """[N, 1] with the stride of a column that is padded to four rows, as packed scales have it."""
    storage = torch.zeros(1, 4, dtype=rows.dtype)
    column = storage.t()[: rows.shape[0]]
    return column.copy_(rows)


def exchange(verbs: Collectives) -> dict[str, Tensor]:
    """Every case once; a rank without a part in it has no entry."""
    rank = verbs.rank
    mine = numbered_bytes(rank, ROWS[rank])
    received = [SENT[source][rank] for source in WORLD]
    outgoing = numbered_bytes(rank, sum(SENT[rank]))
    got = {
        f"all_gather_v.{name}": verbs.all_gather_v(mine.view(dtype), ROWS, WORLD)
        for name, dtype in (
            ("fp8", torch.float8_e4m3fn),
            ("bf16", torch.bfloat16),
            ("int64", torch.int64),
        )
    }
    got["all_gather_v.flat"] = verbs.all_gather_v(mine.view(torch.int64)[:, 0], ROWS, WORLD)
    got["all_gather_v.cube"] = verbs.all_gather_v(mine.view(-1, 4, 4), ROWS, WORLD)
    got["all_gather_v.column"] = verbs.all_gather_v(
        single_column(mine.view(torch.int32)[:, :1]), ROWS, WORLD
    )
    got["all_gather_v.nothing"] = verbs.all_gather_v(mine[:0], (0, 0, 0), WORLD)
    got["all_to_all_v.fp8"] = verbs.all_to_all_v(
        outgoing.view(torch.float8_e4m3fn), SENT[rank], received, WORLD
    )
    got["all_to_all_v.bf16"] = verbs.all_to_all_v(
        outgoing.view(torch.bfloat16), SENT[rank], received, WORLD
    )
    if rank in PAIR:
        got["all_gather_v.pair"] = verbs.all_gather_v(mine, (3, 2), PAIR)
    return got | reductions(verbs)


def reductions(verbs: Collectives) -> dict[str, Tensor]:
    """Sums whose bits depend on order and roundings; five rows do not split evenly over three."""
    rank = verbs.rank
    terms = torch.tensor([[256.0, 1.0, 1.0], [1.0, 2.0**-9, 3.0], [-3e38, 3e38, 0.1]])
    summand = (terms[:, rank].repeat(5, 2) + torch.arange(5)[:, None]).to(torch.bfloat16)
    ids = torch.arange(5) + 2**40 * rank
    got = {
        "all_reduce.bf16": verbs.all_reduce(summand, WORLD),
        "all_reduce.int64": verbs.all_reduce(ids, WORLD),
        "all_reduce.nothing": verbs.all_reduce(summand[:0], WORLD),
        "reduce_scatter_v.bf16": verbs.reduce_scatter_v(summand, (4, 0, 1), WORLD),
        "reduce_scatter_v.int64": verbs.reduce_scatter_v(ids, (4, 0, 1), WORLD),
        "reduce_scatter_v.nothing": verbs.reduce_scatter_v(summand[:0], (0, 0, 0), WORLD),
    }
    if rank in PAIR:
        got["all_reduce.pair"] = verbs.all_reduce(summand, PAIR)
        got["reduce_scatter_v.pair"] = verbs.reduce_scatter_v(summand, (2, 3), PAIR)
    return got


CASES = (
    *(f"all_gather_v.{name}" for name in ("fp8", "bf16", "int64", "flat", "cube", "column")),
    *("all_gather_v.nothing", "all_to_all_v.fp8", "all_to_all_v.bf16", "all_gather_v.pair"),
    *(
        f"{verb}.{name}"
        for verb in ("all_reduce", "reduce_scatter_v")
        for name in ("bf16", "int64", "nothing", "pair")
    ),
)


def refusals(verbs: DistributedCollectives) -> dict[str, Tensor]:
    """Which wrong uses raised what they have to, as flags."""
    raised = {}
    try:
        verbs.all_gather_v(torch.zeros(ROWS[verbs.rank] + 1), ROWS, WORLD)
    except CollectiveMismatchError:
        raised["refuses.miscounted"] = torch.ones(1)
    try:
        DistributedCollectives(WORLD, [(2, 0)])
    except ValueError:
        raised["refuses.descending"] = torch.ones(1)
    try:
        DistributedCollectives((0, 1), [])
    except RuntimeError:
        raised["refuses.world"] = torch.ones(1)
    return raised


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", len(WORLD))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(WORLD))
    verbs = DistributedCollectives(WORLD, [WORLD, PAIR])
    save_file({**exchange(verbs), **refusals(verbs)}, f"{folder}/rank_{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gloo(tmp_path_factory) -> list[dict[str, Tensor]]:
    """What each rank of a world of processes received."""
    folder: Path = tmp_path_factory.mktemp("gloo")
    mp.spawn(run_rank, args=(str(folder),), nprocs=len(WORLD))
    return [load_file(folder / f"rank_{rank}.safetensors") for rank in WORLD]


@pytest.fixture(scope="module")
def loopback() -> list[dict[str, Tensor]]:
    return LoopbackWorld(len(WORLD)).run(exchange)


@pytest.mark.parametrize("case", CASES)
def test_gloo_hands_over_the_bytes_that_loopback_hands_over(gloo, loopback, case):
    for here, there in zip(gloo, loopback, strict=True):
        assert (case in here) == (case in there)
        if case in there:
            assert here[case].dtype == there[case].dtype
            assert here[case].shape == there[case].shape
            assert torch.equal(here[case].view(torch.uint8), there[case].view(torch.uint8))


def test_every_case_was_exchanged(loopback):
    assert set(loopback[0]) == set(CASES)


@pytest.mark.parametrize("wrong", ["miscounted", "descending", "world"])
def test_a_wrong_use_is_refused_before_anything_is_sent(gloo, wrong):
    assert all(f"refuses.{wrong}" in rank for rank in gloo)

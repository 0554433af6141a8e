"""Ranks as Ray actors over gloo: with every glue and every dispatcher, the bits of one process."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch.distributed as dist

from actors.cluster import LOOPBACK, ray_session
from actors.plan import LayerPlan
from actors.planning import plan_of
from actors.progress import host_store
from actors.rank_actor import RankActor, RankFailure
from actors.rank_program import RankReport
from actors.wire import pack_input, unpack_report
from actors.world import LoopbackRanks
from moe.batch import LayerInput
from scenarios.batches import batch_of
from scenarios.inputs import deal
from scenarios.loader import load_scenario
from tests.e2e.test_ray_world import differences

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2] / "scenarios"
DISPATCHERS = (
    "deepep_ll",
    "deepep_v2_decode",
    "deepep_v2_extend",
    "flashinfer_decode",
    "flashinfer_extend",
)
"""Whatever else a dispatcher may call; the other files of the folder make the same calls."""

RECIPES = ("deepseek_v4_mxfp4", "kimi_k2")
"""Weights of two codes a byte; a wire whose scales have rows along the fastest axis."""

FILES = [
    *sorted(ROOT.glob("topologies/*.yaml")),
    *(ROOT / "dispatch" / f"{name}.yaml" for name in DISPATCHERS),
    *(ROOT / "recipes" / f"{name}.yaml" for name in RECIPES),
]
RANKS = 8
LIMIT_S = 60.0


class ReusedRank(RankActor):
    """A rank that goes from world to world: its process starts and imports torch once."""

    def leave(self) -> None:
        dist.destroy_process_group()


class ReusedRanks:
    """Eight processes of which the first form a new world for each plan."""

    def __init__(self) -> None:
        remote = ray.remote(ReusedRank).options(num_cpus=0)
        self._actors: list[Any] = [remote.remote() for _ in range(RANKS)]

    def forward(self, plan: LayerPlan, rows: Sequence[LayerInput]) -> list[RankReport]:
        store = host_store(LOOPBACK)
        at = (LOOPBACK, store.port)
        ranks = list(enumerate(self._actors[: plan.layout.world_size]))
        self._answers([actor.start.remote(rank, plan, (), at, LIMIT_S) for rank, actor in ranks])
        reports = self._answers(
            [actor.forward.remote(pack_input(rows[rank])) for rank, actor in ranks]
        )
        self._answers([actor.leave.remote() for _, actor in ranks])
        return [unpack_report(report, {}) for report in reports]

    def _answers(self, calls: Sequence[Any]) -> list[Any]:
        answers = ray.get(list(calls), timeout=LIMIT_S)
        assert [answer.cause for answer in answers if isinstance(answer, RankFailure)] == []
        return answers


@pytest.fixture(scope="module")
def processes() -> Iterator[ReusedRanks]:
    with ray_session(None, num_cpus=2):
        yield ReusedRanks()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_stage_tensor_has_the_bits_of_the_loopback_world(processes, path):
    loaded = load_scenario(path)
    plan = plan_of(loaded)
    rows = deal(batch_of(loaded, "random"), plan.sync)
    with LoopbackRanks(plan) as world:
        want = world.forward(rows, LIMIT_S)
    got = processes.forward(plan, rows)
    assert differences(got, want) == []
    assert [report.calls for report in got] == [report.calls for report in want]

"""Ranks as Ray actors: the same bits as in one process, and a true sentence when a rank fails."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch

from actors.cluster import ClusterUnavailableError, RayRanks, ray_session
from actors.plan import LayerPlan
from actors.rank_program import RankReport
from actors.world import LoopbackRanks, WorldFailedError
from moe.batch import Batch, LayerInput
from moe.faults import arm
from moe.formats import (
    DispatchFormat,
    GatedActivation,
    GemmLayout,
    QuantRecipe,
    RunnerBackend,
    ScaleFormat,
    ScoringFunc,
    SharedExpertMode,
)
from moe.routing import RoutingRule
from scenarios.inputs import deal, random_hidden_states
from scenarios.synthetic_weights import SyntheticWeights
from topology.layout import ParallelLayout
from topology.sync import SyncOptions, sync_plan

pytestmark = pytest.mark.e2e

HIDDEN, INTERMEDIATE, EXPERTS, SEED = 256, 128, 8, 7
START_S = 60.0
FORWARD_S = 30.0
PATIENCE_S = 4.0
ROOT = Path(__file__).parents[2]
SCRIPT_ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
}


def make_plan(
    recipe: QuantRecipe = QuantRecipe.FP8_BLOCK128,
    scale_format: ScaleFormat = ScaleFormat.UE8M0,
    tokens: tuple[int, ...] = (5, 9),
) -> LayerPlan:
    layout = ParallelLayout(attn_dp=len(tokens), ep=len(tokens))
    return LayerPlan(
        layout=layout,
        sync=sync_plan(layout, tokens, a2a=True, extend=True, options=SyncOptions()),
        num_experts=EXPERTS,
        redundant=0,
        shuffled_by=None,
        routing=RoutingRule(top_k=3, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=True),
        dispatch_format=DispatchFormat.DEEPEP_NORMAL,
        gemm_layout=GemmLayout.CONTIG,
        runner=RunnerBackend.DEEP_GEMM,
        recipe=recipe,
        scale_format=scale_format,
        wire_format=scale_format,
        shared=SharedExpertMode.REPLICATED,
        gathers_fp8=False,
        row_alignment=128,
        activation=GatedActivation(limit=10.0),
        expert_hidden_size=HIDDEN,
        routed_scaling_factor=1.5,
        tail_scaling_factor=1.5,
        weights=SyntheticWeights(
            seed=SEED,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            shared_intermediate_size=INTERMEDIATE,
            num_experts=EXPERTS,
            correction_bias=True,
            recipe=recipe,
        ),
        seed=SEED,
    )


def rows_of(plan: LayerPlan) -> list[LayerInput]:
    tokens = sum(map(len, plan.sync.entry))
    return deal(Batch(hidden_states=random_hidden_states(SEED, tokens, HIDDEN)), plan.sync)


def differences(got: list[RankReport], want: list[RankReport]) -> list[str]:
    """Names of stage tensors whose bytes, shape, dtype or strides differ."""
    found = []
    for mine, theirs in zip(got, want, strict=True):
        assert list(mine.trace.stages) == list(theirs.trace.stages)
        for stage, tensors in theirs.trace.stages.items():
            assert list(mine.trace[stage]) == list(tensors)
            for name, expected in tensors.items():
                actual = mine.trace[stage][name]
                same_form = (
                    actual.dtype == expected.dtype
                    and actual.shape == expected.shape
                    and actual.stride() == expected.stride()
                )
                if not same_form or not torch.equal(as_bytes(actual), as_bytes(expected)):
                    found.append(f"{stage}/{theirs.trace.rank}/{name}")
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every element's bytes; NaN payloads count too."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def failing(fault: str, timeout_s: float) -> WorldFailedError:
    """How a world with a fault on rank 1 ends."""
    plan = make_plan()
    armed = arm(fault, {"rank": 1}, [len(rows) for rows in plan.sync.entry])
    world = RayRanks(plan, [armed], timeout_s=START_S)
    with world, pytest.raises(WorldFailedError) as caught:
        world.forward(rows_of(plan), timeout_s)
    return caught.value


def states(error: WorldFailedError) -> list[str]:
    return [status.state for status in error.ranks]


def gone(pid: int, within_s: float = 10.0) -> bool:
    """The process ends within a while (a zombie has ended)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state.split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def run_script(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A driver process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=SCRIPT_ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


@pytest.fixture(scope="module", autouse=True)
def ray_cluster() -> Iterator[None]:
    with ray_session(None, num_cpus=2):
        yield


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            make_plan(QuantRecipe.FP8_BLOCK128, ScaleFormat.UE8M0, (5, 0, 9, 3)), id="fp8-ue8m0"
        ),
        pytest.param(make_plan(QuantRecipe.FP8_BLOCK128, ScaleFormat.FP32), id="fp8-fp32"),
        pytest.param(make_plan(QuantRecipe.BF16, ScaleFormat.NONE), id="bf16"),
        pytest.param(make_plan(QuantRecipe.MXFP4_W4A8, ScaleFormat.UE8M0), id="mxfp4"),
    ],
)
def test_every_stage_tensor_has_the_bits_of_the_loopback_world(plan):
    with LoopbackRanks(plan) as here, RayRanks(plan, timeout_s=START_S) as there:
        for _ in range(2):  # the second forward leaves the weights on the ranks
            want = here.forward(rows_of(plan), FORWARD_S)
            got = there.forward(rows_of(plan), FORWARD_S)
            assert differences(got, want) == []
            assert [report.calls for report in got] == [report.calls for report in want]


def test_living_ranks_take_up_another_layer_and_come_back():
    plans = [make_plan(), replace(make_plan(), weights=replace(make_plan().weights, seed=8))]
    with LoopbackRanks(plans[0]) as here, RayRanks(plans[0], timeout_s=START_S) as there:
        for plan in (*plans, plans[0]):
            here.use(plan)
            there.use(plan)
            want, got = (world.forward(rows_of(plan), FORWARD_S) for world in (here, there))
            assert differences(got, want) == []


@pytest.fixture(scope="module")
def raised() -> WorldFailedError:
    return failing("rank_raises", FORWARD_S)


@pytest.fixture(scope="module")
def dead_world() -> Iterator[RayRanks]:
    plan = make_plan()
    with RayRanks(
        plan,
        [arm("rank_dies", {"rank": 1}, [len(rows) for rows in plan.sync.entry])],
        timeout_s=START_S,
    ) as world:
        yield world


@pytest.fixture(scope="module")
def died(dead_world) -> WorldFailedError:
    with pytest.raises(WorldFailedError) as caught:
        dead_world.forward(rows_of(make_plan()), FORWARD_S)
    return caught.value


@pytest.fixture(scope="module")
def hung() -> WorldFailedError:
    return failing("rank_hangs", PATIENCE_S)


@pytest.fixture(scope="module")
def skipped() -> WorldFailedError:
    return failing("combine_skipped", PATIENCE_S)


def test_a_rank_that_raises_is_named_with_its_exception(raised):
    status = raised.ranks[1]
    assert (status.state, status.stage) == ("raised", "gemm1")
    assert raised.summary.startswith(
        f"rank 1 raised in stage gemm1 on {status.node} (pid {status.pid}): InjectedError: "
    )


def test_the_cause_of_a_raise_shows_the_innermost_call(raised):
    assert "in rank_raises" in raised.ranks[1].cause.splitlines()[-2]


def test_peers_of_a_rank_that_raises_are_released(raised):
    assert states(raised) == ["released", "raised"]


def test_a_rank_that_is_killed_died_in_the_stage_it_was_in(died):
    status = died.ranks[1]
    assert (states(died), status.stage) == (["released", "died"], "gemm1")
    assert died.summary.startswith(
        f"rank 1 died in stage gemm1 on {status.node} (pid {status.pid}): "
    )


def test_the_rank_that_computes_is_the_one_that_hung(hung):
    status = hung.ranks[1]
    assert states(hung) == ["released", "hung"]
    assert hung.summary == (
        f"rank 1 hung in stage gemm1 on {status.node} (pid {status.pid}): no answer for 4 s; "
        "rank 0 waits in all_to_all_v of stage combine"
    )


def test_a_rank_that_skips_a_collective_is_the_one_at_fault(skipped):
    status = skipped.ranks[1]
    assert (states(skipped), status.stage) == (["released", "hung"], "combine")
    assert skipped.summary == (
        f"rank 1 returned on {status.node} (pid {status.pid}): its forward ended without "
        "all_to_all_v of stage combine; rank 0 waits in all_to_all_v of stage combine"
    )


@pytest.mark.parametrize("failure", ["raised", "died", "hung", "skipped"])
def test_no_process_of_a_failed_world_is_left(failure, request):
    error = request.getfixturevalue(failure)
    assert [status.pid for status in error.ranks if not gone(status.pid)] == []


class Unreadable:
    """Travels well, but cannot be put together again."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("not a number",)


def test_a_rank_that_cannot_read_its_plan_fails_at_start():
    plan = replace(make_plan(), weights=Unreadable())
    with RayRanks(plan, timeout_s=START_S) as world, pytest.raises(WorldFailedError) as caught:
        world.ranks()
    assert " raised in stage start: " in caught.value.summary
    assert "invalid literal for int()" in caught.value.summary
    assert set(states(caught.value)) <= {"raised", "not_started"}


def test_ranks_are_processes_of_their_own(raised):
    assert len({os.getpid(), *(status.pid for status in raised.ranks)}) == 3


def test_a_failed_world_fails_again_with_the_same_error(dead_world, died):
    with pytest.raises(WorldFailedError) as again:
        dead_world.forward([], FORWARD_S)
    assert again.value is died


def test_ranks_that_do_not_start_in_time_are_named(monkeypatch):
    monkeypatch.setattr("actors.cluster.START_S", 0.0)
    with RayRanks(make_plan(), timeout_s=0.01) as world, pytest.raises(WorldFailedError) as caught:
        world.ranks()
    assert caught.value.summary == (
        "rank 0 did not start: no answer for 0.01 s; rank 1 did not start: no answer for 0.01 s"
    )
    assert states(caught.value) == ["not_started", "not_started"]


OWN_CLUSTER = """
import sys, time
from contextlib import suppress
from pathlib import Path
import test_ray_world as t

children = Path("/proc/thread-self/children")
plan = t.make_plan()
with suppress(KeyboardInterrupt), t.RayRanks(plan, timeout_s=t.START_S) as world:
    world.forward(t.rows_of(plan), t.FORWARD_S)
    print(*[status.pid for status in world.ranks()], *children.read_text().split(), flush=True)
    if sys.stdin.readline() == "fail\\n":
        with suppress(t.WorldFailedError):
            world.forward(t.rows_of(plan), t.FORWARD_S)
        time.sleep(1.0)  # Ray's own remarks come late
print("left:", *children.read_text().split())
"""


@pytest.mark.parametrize("ending", ["fail", "ctrl-c"])
def test_a_cluster_of_its_own_leaves_no_process_and_no_output_behind(ending):
    script = subprocess.Popen(
        [sys.executable, "-c", OWN_CLUSTER],
        env=SCRIPT_ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    alive = [int(pid) for pid in script.stdout.readline().split()]
    if ending == "ctrl-c":
        script.send_signal(signal.SIGINT)
    if ending == "fail":
        os.kill(alive[1], signal.SIGKILL)
    rest, _ = script.communicate(f"{ending}\n", timeout=START_S)
    assert len(alive) > 2
    assert (rest.strip(), script.returncode) == ("left:", 0)
    assert all(gone(pid) for pid in alive)


def test_another_cluster_than_the_one_joined_is_refused():
    with (
        pytest.raises(ClusterUnavailableError, match=r"'10\.0\.0\.1:6379' is another"),
        ray_session("10.0.0.1:6379"),
    ):
        pass


JOIN = """
import ray, sys
import test_ray_world as t

plan = t.make_plan()
with t.RayRanks(plan, address=sys.argv[1], timeout_s=t.START_S) as world:
    print(len(world.forward(t.rows_of(plan), t.FORWARD_S)), ray.is_initialized())
print(ray.is_initialized())
"""


def test_a_running_cluster_is_joined_by_its_address_and_goes_on():
    address = ray.get_runtime_context().gcs_address
    ended = run_script(JOIN, address, RAY_AUTH_MODE="token")
    assert (ended.stdout, ended.returncode) == ("2 True\nFalse\n", 0)
    assert ray.cluster_resources()["CPU"] == 2.0


@pytest.mark.parametrize("error", [ConnectionError, ValueError, RuntimeError])
def test_what_ray_says_of_an_address_is_told_with_what_to_type(error, monkeypatch):
    def init(**settings):
        raise error("no such place")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    told = "joined at 'nonsense': no such place; start one with `ray start --head`"
    with pytest.raises(ClusterUnavailableError, match=told), ray_session("nonsense"):
        pass


def test_an_address_without_a_cluster_says_what_to_type():
    address = "127.0.0.1:1"
    script = (
        "import sys; from actors.cluster import ray_session; ray_session(sys.argv[1]).__enter__()"
    )
    ended = run_script(script, address)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"actors.cluster.ClusterUnavailableError: no Ray cluster can be joined at {address!r}: "
    )
    assert "ray start --head" in last

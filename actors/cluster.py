"""Ranks as Ray actors: the only file that knows Ray."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, Final, Self

import torch

from actors.plan import LayerPlan
from actors.postmortem import RankEnd, world_failure
from actors.progress import host_store, read_whereabouts
from actors.rank_actor import Joined, RankActor, RankFailure, shared_gpu
from actors.rank_program import RankReport
from actors.signals import keeping_sigterm
from actors.wire import PackedReport, pack_input, unpack_report
from actors.world import RankStatus, WorldFailedError
from moe.batch import LayerInput
from moe.devices import on_device
from moe.faults import ArmedFault
from moe.formats import Stage
from moe.trace import StageTensors
from scenarios.errors import UserError

# Ray reads it when imported. Its remark on a worker that died would stand on our stdout.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

LOOPBACK = "127.0.0.1"

SETTLE_S = 2.0
"""A rank that raised in a collective may have lost a peer: the peer's end is given this long."""

_GPU_A_RANK: Final = MappingProxyType({"num_cpus": 0, "num_gpus": 1})

START_S = 60.0
"""Processes that import torch are given at least this long, however short the time limit."""

REACH_S = 5.0
"""Until an address where nothing answers is an error."""


class ClusterUnavailableError(UserError):
    """The Ray cluster that was asked for cannot be joined."""


@contextmanager
def ray_session(address: str | None, num_cpus: int | None = None) -> Iterator[None]:
    """Ray inside the block; a cluster started here ends with it, one that ran goes on.

    Args:
        address: a running cluster (``host:port`` or ``auto``); None starts one on this machine,
            unless this process is part of one already.
        num_cpus: of a cluster started here: how many workers it starts at a time.

    Raises:
        ClusterUnavailableError: nothing answers at ``address``, or this process has joined
            another cluster.
    """
    if ray.is_initialized():
        _expect_same_cluster(address)
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        cores = num_cpus or os.cpu_count() or 1
        with keeping_sigterm():
            ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    else:
        _join_cluster(address, quiet)
    try:
        yield
    finally:
        ray.shutdown()


class RayRanks:
    """One Ray actor a rank, joined by gloo; see ``World``.

    The constructor only sets everything going; the first forward waits for it. Where every rank
    is stands in a store of the driver, so it can be told after a rank is gone. Every node of the
    cluster needs this project installed.

    Args:
        plan: the layer and its topology.
        faults: what is injected, for all ranks.
        address: see ``ray_session``.
        timeout_s: seconds until a rank that has not joined counts as failed.

    Raises:
        ClusterUnavailableError: nothing answers at ``address``.
    """

    def __init__(
        self,
        plan: LayerPlan,
        faults: Sequence[ArmedFault] = (),
        *,
        address: str | None = None,
        timeout_s: float,
    ) -> None:
        world = plan.layout.world
        self._timeout_s = timeout_s
        self._statuses: list[RankStatus] = []
        self._failure: WorldFailedError | None = None
        self._plan = plan
        self._weights: dict[tuple[int, int], dict[Stage, StageTensors]] = {}
        with ExitStack() as undo:
            cores = min(len(world), os.cpu_count() or 1)
            undo.enter_context(ray_session(address, num_cpus=cores))
            host = _store_host()
            self._store = host_store(host)
            self._actors: list[Any] = []
            undo.callback(self._kill)
            options = _GPU_A_RANK if plan.device == "cuda" else {"num_cpus": 0}
            remote = ray.remote(RankActor).options(scheduling_strategy="SPREAD", **options)
            self._actors += [remote.remote() for _ in world]
            at = (host, self._store.port)
            self._joining = [
                actor.start.remote(rank, plan, tuple(faults), at, timeout_s)
                for rank, actor in enumerate(self._actors)
            ]
            self._undo = undo.pop_all()

    def use(self, plan: LayerPlan) -> None:
        """See ``World``."""
        if plan != self._plan:
            self._expect_joined()
            self._plan = plan
            self._answers([actor.use.remote(plan) for actor in self._actors], self._timeout_s)

    def forward(self, given: Sequence[LayerInput], timeout_s: float) -> list[RankReport]:
        """See ``World``; ``timeout_s`` counts from when all ranks have joined."""
        self._expect_joined()
        answers = self._answers(
            [
                actor.forward.remote(pack_input(one))
                for actor, one in zip(self._actors, given, strict=True)
            ],
            timeout_s,
        )
        return [self._unpack(packed) for packed in answers]

    def ranks(self) -> list[RankStatus]:
        """See ``World``; waits until all ranks have joined."""
        if self._failure is not None:
            return list(self._failure.ranks)
        self._expect_joined()
        return list(self._statuses)

    def close(self) -> None:
        """See ``World``; a Ray that was started for this world ends too."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _expect_joined(self) -> None:
        """Wait for the ranks, once.

        Raises:
            WorldFailedError: a rank did not start, now or earlier, or has no GPU of its own.
        """
        if self._failure is not None:
            raise self._failure
        if not self._statuses:
            joined: list[Joined] = self._answers(self._joining, max(self._timeout_s, START_S))
            statuses = [
                RankStatus(rank=rank, node=one.node, pid=one.pid, device=one.device, state="ok")
                for rank, one in enumerate(joined)
            ]
            shared = shared_gpu(joined)
            if shared is not None:
                self._kill()
                self._failure = WorldFailedError(shared, statuses)
                raise self._failure
            self._statuses = statuses

    def _answers(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """What every rank answered; if one failed, all are killed."""
        ends = _collect(calls, timeout_s)
        if len(ends) == len(calls) and all(end.state == "ok" for end in ends.values()):
            return [ends[rank].answer for rank in range(len(calls))]
        seen = [read_whereabouts(self._store, rank) for rank in range(len(calls))]
        self._kill()
        self._failure = world_failure(ends, seen, timeout_s)
        raise self._failure

    def _unpack(self, packed: PackedReport) -> RankReport:
        """The weights came with a layer's first report; later ones are completed with them."""
        layer = self._plan.layer_fingerprint()
        weights = self._weights.setdefault((layer, packed.rank), {})
        report = unpack_report(packed, weights)
        report = on_device(report, torch.device(self._plan.device))
        weights[Stage.WEIGHTS] = report.trace[Stage.WEIGHTS]
        return report

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()


def _collect(calls: Sequence[Any], timeout_s: float) -> dict[int, RankEnd]:
    """How each rank's call ended, by rank, in the order of arrival.

    Returns when all have ended, ``timeout_s`` is over, or a rank failed: at once if no other rank
    can be the reason, else ``SETTLE_S`` later.
    """
    ends: dict[int, RankEnd] = {}
    rank_of = {call: rank for rank, call in enumerate(calls)}
    open_calls = list(calls)
    deadline = time.monotonic() + timeout_s
    while open_calls:
        left_s = max(0.0, deadline - time.monotonic())
        ready, open_calls = ray.wait(open_calls, num_returns=1, timeout=left_s)
        if not ready:
            break
        end = ends[rank_of[ready[0]]] = _end(ready[0], timeout_s)
        if end.state != "ok":
            settle_s = 0.0 if end.is_root else SETTLE_S
            deadline = min(deadline, time.monotonic() + settle_s)
    return ends


def _end(call: Any, timeout_s: float) -> RankEnd:  # noqa: ANN401  Ray's references are untyped
    try:
        answer = ray.get(call, timeout=timeout_s)
    except OutOfMemoryError:
        return RankEnd(state="died", cause="out of memory: killed by Ray's memory monitor")
    except RayActorError as error:
        return RankEnd(state="died", cause=_exit_detail(str(error)))
    except RayError as error:
        return RankEnd(state="raised", cause=_last_line(str(error)))
    if isinstance(answer, RankFailure):
        return RankEnd(state="raised", cause=answer.cause, place=answer.place)
    return RankEnd(state="ok", answer=answer)


def _exit_detail(message: str) -> str:
    """What Ray says of a process that ended, without its list of possible reasons."""
    detail = message.rpartition("Worker exit detail:")[2].partition("Some common causes")[0]
    return _last_line(detail)


def _last_line(message: str) -> str:
    """The line that names the error: of a traceback, the last one."""
    return message.strip().rpartition("\n")[2].strip()


def _first_cause(error: BaseException) -> BaseException:
    """Where a chain of exceptions began: Ray says there that it wanted a token, for one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _store_host() -> str:
    """Where ranks find the driver: loopback if all are on this machine."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if len(nodes) == 1:
        return LOOPBACK
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _expect_same_cluster(address: str | None) -> None:
    joined = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", joined):
        raise ClusterUnavailableError(
            f"this process has joined the Ray cluster at {joined} already; {address!r} is another"
        )


def _join_cluster(address: str, quiet: dict[str, Any]) -> None:
    hint = (
        "start one with `ray start --head` and give the address it prints, "
        "or leave --address out to use this machine alone"
    )
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection((host, int(port)), timeout=REACH_S).close()
        with keeping_sigterm():
            ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        reason = _last_line(str(_first_cause(error)))
        raise ClusterUnavailableError(
            f"no Ray cluster can be joined at {address!r}: {reason}; {hint}"
        ) from error

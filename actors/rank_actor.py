"""The process of one rank: joins the world, runs forwards. It knows torch.distributed, not Ray."""

import fcntl
import os
import socket
import struct
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from actors.machine import TRANSPORTS, computing_on, name_of
from actors.plan import LayerPlan
from actors.progress import Place, ProgressWriter, ReportedCollectives, connect_store
from actors.rank_program import RankProgram
from actors.wire import PackedInput, PackedReport, pack_report, unpack_input
from moe.faults import ArmedFault
from moe.formats import Stage
from topology.distributed import DistributedCollectives
from topology.mesh import Group

T = TypeVar("T")

NEVER = timedelta(days=7)
"""Ranks do not time out by themselves: the driver holds the only clock, and kills."""

SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


class WorldNotFormedError(RuntimeError):
    """The processes that were to be one world are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What a rank raised, as text: an exception class need not exist where it is read.

    cause  type, message and the innermost lines of the traceback
    place  where the rank was
    """

    cause: str
    place: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank is part of its world.

    device  cpu, or the GPU as ``name_of`` tells it
    """

    node: str
    pid: int
    device: str


class RankActor:
    """One rank. A plain class: Ray's actors cannot be slotted dataclasses.

    Every method answers with a value, also when the rank raised.
    """

    _progress: ProgressWriter | None = None

    def start(
        self,
        rank: int,
        plan: LayerPlan,
        faults: Sequence[ArmedFault],
        store_address: tuple[str, int],
        timeout_s: float,
    ) -> Joined | RankFailure:
        """Join the world whose store the driver hosts.

        Args:
            rank: its number in the world.
            plan: the layer and its topology.
            faults: what is injected, for all ranks.
            store_address: host and port of the store.
            timeout_s: until a store that does not answer is an error.
        """
        return self._answer(lambda: self._join(rank, plan, faults, store_address, timeout_s))

    def use(self, plan: LayerPlan) -> RankFailure | None:
        """Compute this layer from now on."""
        return self._answer(lambda: self._use(plan))

    def forward(self, given: PackedInput) -> PackedReport | RankFailure:
        """One forward of this rank's rows; weights are in a layer's first report only."""
        return self._answer(lambda: self._forward(given))

    def _answer(self, work: Callable[[], T]) -> T | RankFailure:
        try:
            return work()
        except Exception as error:  # noqa: BLE001  whatever a rank raises is the world's failure
            place = self._progress.place if self._progress else None
            return RankFailure(cause=cause_of(error), place=place)

    def _join(
        self,
        rank: int,
        plan: LayerPlan,
        faults: Sequence[ArmedFault],
        store_address: tuple[str, int],
        timeout_s: float,
    ) -> Joined:
        torch.set_num_threads(1)
        self._progress = ProgressWriter(connect_store(*store_address, timeout_s), rank)
        self._progress.home(socket.gethostname(), os.getpid())
        layout = plan.layout
        self._progress.enter("rendezvous")
        _form_world(rank, plan, store_address, timeout_s)
        self._progress.leave()
        self._collectives = ReportedCollectives(
            DistributedCollectives(layout.world, layout.groups()), self._progress
        )
        expect_world(self._collectives, layout.world, plan.device)
        self._rank, self._faults = rank, tuple(faults)
        self._layers: dict[int, RankProgram] = {}
        self._reported: set[int] = set()
        self._use(plan)
        return Joined(node=socket.gethostname(), pid=os.getpid(), device=name_of(plan.device))

    def _use(self, plan: LayerPlan) -> None:
        assert self._progress is not None
        self._layer = plan.layer_fingerprint()
        if self._layer not in self._layers:
            self._layers[self._layer] = RankProgram(
                self._rank, plan, self._faults, self._progress.reached
            )
        else:
            self._layers[self._layer].deal_by(plan)

    def _forward(self, given: PackedInput) -> PackedReport:
        program = self._layers[self._layer]
        with computing_on(program.given_plan.device):
            report = program.forward(unpack_input(given), self._collectives)
        known = (Stage.WEIGHTS,) if self._layer in self._reported else ()
        self._reported.add(self._layer)
        return pack_report(report, known)


def expect_world(collectives: ReportedCollectives, world: Group, device: str = "cpu") -> None:
    """Every rank of the world answers in its place.

    Raises:
        WorldNotFormedError: another number of ranks, or other ranks.
    """
    mine = torch.tensor([collectives.rank], device=device)
    present = collectives.all_gather_v(mine, [1] * len(world), world).tolist()
    if present != list(world) or collectives.world_size != len(world):
        raise WorldNotFormedError(
            f"ranks {present} of {collectives.world_size} came together instead of {list(world)}"
        )


def shared_gpu(joined: Sequence[Joined]) -> str | None:
    """Which ranks of a node share a GPU, in words; None: none do.

    They do where Ray was told of more GPUs than there are.
    """
    homes = [(one.node, one.device) for one in joined if one.device != "cpu"]
    shared = [home for home, ranks in Counter(homes).items() if ranks > 1]
    if not shared:
        return None
    node, device = shared[0]
    ranks = [
        str(rank) for rank, one in enumerate(joined) if (one.node, one.device) == (node, device)
    ]
    return f"ranks {' and '.join(ranks)} were given one GPU, {device} on {node}; each needs its own"


def cause_of(error: BaseException) -> str:
    """Type and message in the first line, the two innermost calls below."""
    calls = traceback.format_list(traceback.extract_tb(error.__traceback__)[-2:])
    return f"{type(error).__name__}: {error}\n{''.join(calls)}".rstrip()


def interface_towards(host: str, port: int) -> str | None:
    """The network interface that packets for ``host`` leave by, or None if it cannot be told.

    Binding gloo to it needs no resolvable host name, and no name that resolves to loopback can
    mislead it.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((host, port))
        source = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == source:
                return name
    return None


def _form_world(
    rank: int, plan: LayerPlan, store_address: tuple[str, int], timeout_s: float
) -> None:
    interface = interface_towards(*store_address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store: Any = connect_store(*store_address, timeout_s)
    dist.init_process_group(
        TRANSPORTS[plan.device],
        store=store,
        rank=rank,
        world_size=plan.layout.world_size,
        timeout=NEVER,
    )

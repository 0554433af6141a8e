"""Where every rank is, kept outside the rank: still there to read when the rank is gone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from topology.collectives import Collectives, ForwardingCollectives
from topology.mesh import Group

START = "start"
"""Where a rank is before its first stage: joining the world."""


class Store(Protocol):
    """What is used of a torch.distributed store."""

    @property
    def port(self) -> int:
        """Where it listens."""
        ...

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        ...

    def get(self, key: str) -> bytes:
        """A value that is there; blocks if it is not."""
        ...

    def check(self, keys: list[str]) -> bool:
        """All of these are there."""
        ...


def host_store(host: str) -> Store:
    """A store in this process that ranks reach under ``host`` and its port."""
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host, 0, is_master=True, wait_for_workers=False
    )
    return store


def connect_store(host: str, port: int, timeout_s: float) -> Store:
    """A connection to the store of ``host_store``.

    Raises:
        DistNetworkError: nothing answers within ``timeout_s``.
    """
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=timedelta(seconds=timeout_s)
    )
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far a rank has come.

    stage    the stage it is in
    op       the collective it is in; "" while it computes
    entered  collectives it has entered since it started
    """

    stage: str = START
    op: str = ""
    entered: int = 0

    def encode(self) -> str:
        """As text for the store."""
        return f"{self.stage},{self.op},{self.entered}"

    @classmethod
    def decode(cls, text: str) -> "Place":
        """The place of ``encode`` again."""
        stage, op, entered = text.split(",")
        return cls(stage=stage, op=op, entered=int(entered))


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What the store knows of a rank; None where the rank never said.

    node, pid  the process it is
    place      how far it came
    """

    node: str | None = None
    pid: int | None = None
    place: Place | None = None


class ProgressWriter:
    """A rank's side: two short messages a stage, which nobody answers (1 us each).

    Args:
        store: a connection of its own; one that waits for a key would hold progress up.
        rank: whose progress it is.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.place = Place()
        self._store = store
        self._rank = rank
        self._heard = True

    def home(self, node: str, pid: int) -> None:
        """Say which process the rank is."""
        self._write("home", f"{node},{pid}")
        self._write("place", self.place.encode())

    def reached(self, stage: str, op: str = "") -> None:
        """The rank got to a stage; an ``op`` is left to ``ReportedCollectives``."""
        if not op:
            self._move(Place(stage=stage, entered=self.place.entered))

    def enter(self, op: str) -> None:
        """The rank goes into a collective of its stage."""
        self._move(Place(stage=self.place.stage, op=op, entered=self.place.entered + 1))

    def leave(self) -> None:
        """The rank came out of the collective."""
        self._move(Place(stage=self.place.stage, entered=self.place.entered))

    def _move(self, place: Place) -> None:
        self.place = place
        self._write("place", place.encode())

    def _write(self, what: str, text: str) -> None:
        """A store that is gone costs the progress, never the rank."""
        if self._heard:
            try:
                self._store.set(f"{what}/{self._rank}", text)
            except dist.DistError:
                self._heard = False


def read_whereabouts(store: Store, rank: int) -> Whereabouts:
    """The driver's side: the last thing a rank said, without waiting for it."""
    if not store.check([f"home/{rank}"]):
        return Whereabouts()
    node, _, pid = store.get(f"home/{rank}").decode().rpartition(",")
    place = None
    if store.check([f"place/{rank}"]):
        place = Place.decode(store.get(f"place/{rank}").decode())
    return Whereabouts(node=node, pid=int(pid), place=place)


class ReportedCollectives(ForwardingCollectives):
    """Tells the progress when a call begins and when it is over.

    It sits right above the transport, so a collective that a fault skips is not reported.
    """

    def __init__(self, inner: Collectives, progress: ProgressWriter) -> None:
        super().__init__(inner)
        self._progress = progress

    @contextmanager
    def watching(self, op: str, rows: Tensor, group: Group) -> Iterator[None]:
        """Enter and leave; a call that raised is not left."""
        self._progress.enter(op)
        yield
        if rows.is_cuda:  # NCCL returns before anything has moved
            torch.cuda.synchronize()
        self._progress.leave()

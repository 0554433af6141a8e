"""What a rank says of its way is there to read, and never costs the rank."""

import time
from collections.abc import Iterator

import pytest
import torch

from actors.progress import (
    Place,
    ProgressWriter,
    ReportedCollectives,
    Store,
    Whereabouts,
    connect_store,
    host_store,
    read_whereabouts,
)
from topology.collectives import Collectives
from topology.loopback import LoopbackWorld

HOST = "127.0.0.1"


@pytest.fixture
def hosted() -> Iterator[Store]:
    store = host_store(HOST)
    yield store
    del store


@pytest.fixture
def writer(hosted) -> ProgressWriter:
    return ProgressWriter(connect_store(HOST, hosted.port, 10.0), rank=3)


def eventually(store: Store, rank: int, place: Place) -> Place | None:
    """The rank's place once the store has heard ``place``, else what it heard last."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if read_whereabouts(store, rank).place == place:
            return place
        time.sleep(0.005)
    return read_whereabouts(store, rank).place


def test_a_rank_that_never_spoke_is_nowhere(hosted):
    assert read_whereabouts(hosted, 3) == Whereabouts()


def test_a_rank_that_only_said_where_it_lives_is_starting(hosted, writer):
    writer.home("a,b", 42)
    assert eventually(hosted, 3, Place(stage="start")) == Place(stage="start")
    assert read_whereabouts(hosted, 3).node == "a,b"
    assert read_whereabouts(hosted, 3).pid == 42


def test_the_last_stage_reached_can_be_read(hosted, writer):
    writer.home("n", 1)
    writer.reached("gemm1")
    assert eventually(hosted, 3, Place(stage="gemm1")) == Place(stage="gemm1")


def test_a_collective_is_read_with_the_stage_it_belongs_to(hosted, writer):
    writer.home("n", 1)
    writer.reached("combine")
    writer.enter("all_to_all_v")
    inside = Place(stage="combine", op="all_to_all_v", entered=1)
    assert eventually(hosted, 3, inside) == inside


def test_a_collective_that_was_left_stays_counted(writer):
    writer.reached("combine")
    writer.enter("all_to_all_v")
    writer.leave()
    assert writer.place == Place(stage="combine", entered=1)


def test_a_rank_outlives_the_store():
    store = host_store(HOST)
    writer = ProgressWriter(connect_store(HOST, store.port, 10.0), rank=0)
    del store
    for _ in range(20):  # the first writes still fit into the closed connection
        writer.reached("gemm1")
        time.sleep(0.005)
    assert writer.place == Place(stage="gemm1")


def test_a_message_costs_less_than_100_us(writer):
    best_s = min(_seconds_of_a_message(writer) for _ in range(5))
    assert best_s < 100e-6


def _seconds_of_a_message(writer: ProgressWriter, repeats: int = 200) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        writer.reached("gemm1")
    return (time.perf_counter() - start) / repeats


class Heard(ProgressWriter):
    """Keeps every place instead of sending it."""

    def __init__(self) -> None:
        self.place = Place()
        self.places: list[Place] = []

    def _move(self, place: Place) -> None:
        self.place = place
        self.places.append(place)


@pytest.mark.parametrize("op", ["all_gather_v", "all_to_all_v"])
def test_a_collective_is_reported_when_entered_and_when_left(op):
    heard = Heard()

    def program(verbs: Collectives) -> list[int]:
        reported = ReportedCollectives(verbs, heard)
        arguments = ([1], (0,)) if op == "all_gather_v" else ([1], [1], (0,))
        rows: torch.Tensor = getattr(reported, op)(torch.tensor([5]), *arguments)
        return rows.tolist()

    assert LoopbackWorld(1).run(program) == [[5]]
    assert heard.places == [Place(op=op, entered=1), Place(entered=1)]

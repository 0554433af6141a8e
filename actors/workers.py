"""Worker processes for scenarios on loopback: one thread each, and none outlives its command."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import TypeVar

import torch

from actors.memory import keep_freed_memory

Item = TypeVar("Item")
Done = TypeVar("Done")


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of processes; whoever leaves it, interrupted or not, does not wait for its work."""
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin)
    try:
        yield pool
    finally:
        for worker in active_children():
            worker.kill()
        pool.shutdown(cancel_futures=True)


def as_done(
    work: Callable[[Item], Done], items: Sequence[Item], jobs: int
) -> Iterator[tuple[int, Done]]:
    """The number of each item with what became of it, as soon as that is known.

    Args:
        work: a function of a module, so that a process can be told of it.
        items: what to give to it.
        jobs: processes; with 1, this one, and in order.
    """
    if min(jobs, len(items)) <= 1:
        yield from enumerate(map(work, items))
        return
    with workers(min(jobs, len(items))) as pool:
        numbers = {pool.submit(work, item): number for number, item in enumerate(items)}
        for future in as_completed(numbers):
            yield numbers[future], future.result()


def _begin() -> None:
    """Processes share the cores among themselves, and end when the command does."""
    torch.set_num_threads(1)
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_command, daemon=True).start()


def _end_with_the_command() -> None:
    """A command that is killed cannot end its processes: they watch it."""
    command = parent_process()
    assert command is not None, "workers are started by a command"
    command.join()
    os._exit(1)

"""Faults of the machinery below the layer: a rank that raises, dies or hangs."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from moe.faults.kinds import Fault, FaultContext, FaultKind
from moe.formats import Stage

V = TypeVar("V")


class InjectedError(RuntimeError):
    """Raised by the fault ``rank_raises``."""


def rank_raises(value: V, context: FaultContext) -> V:
    """An exception in the middle of a stage."""
    raise InjectedError("injected: this rank raises")


def rank_dies(value: V, context: FaultContext) -> V:
    """The process is killed, as by the kernel when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return value


def rank_hangs(value: V, context: FaultContext) -> V:
    """The process never comes back from the stage."""
    while True:
        time.sleep(3600)


def _failure(act: Callable[..., Any], about: str, *, needs_process: bool) -> Fault:
    return Fault(
        name=act.__name__,
        kind=FaultKind.VALUE,
        stage=Stage.GEMM1,
        about=about,
        origin="infrastructure",
        params={"rank": "auto", "stage": "gemm1"},
        act=act,
        needs_process=needs_process,
    )


PROCESS_FAULTS: Final = (
    _failure(rank_raises, "an exception in the middle of a stage", needs_process=False),
    _failure(rank_dies, "the rank's process is killed", needs_process=True),
    _failure(rank_hangs, "the rank never leaves a stage", needs_process=True),
)

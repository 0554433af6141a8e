"""SIGTERM unwinds a command as Ctrl-C does, so that ranks are gone before it is."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Termination:
    """Whether somebody asked this process to end; a handler of SIGTERM."""

    is_asked: bool = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Interrupt what runs, once: a second request does not stop the unwinding.

        Raises:
            KeyboardInterrupt: always. Ray turns any other exception of a handler into an abort.
        """
        self.is_asked = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt


@contextmanager
def termination() -> Iterator[Termination]:
    """Inside, SIGTERM interrupts; behind it the process has its former handler."""
    asked = Termination()
    former = signal.signal(signal.SIGTERM, asked)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, former)


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Inside, a library may install a handler of its own; behind it ours is back."""
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as ended:
        if ended.code == signal.SIGTERM and isinstance(former, Termination):
            former(signal.SIGTERM, None)  # theirs took it for us
        raise
    finally:
        if threading.current_thread() is threading.main_thread():  # only it may set handlers
            signal.signal(signal.SIGTERM, former)

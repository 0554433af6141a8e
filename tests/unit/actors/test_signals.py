"""SIGTERM interrupts what runs, and is told from Ctrl-C."""

import os
import signal

import pytest

from actors.signals import keeping_sigterm, termination


def test_sigterm_interrupts_and_is_remembered():
    with termination() as asked:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert asked.is_asked


def test_a_second_sigterm_does_not_stop_the_unwinding():
    with termination():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


def test_the_former_handler_comes_back():
    former = signal.getsignal(signal.SIGTERM)
    with termination():
        assert signal.getsignal(signal.SIGTERM) is not former
    assert signal.getsignal(signal.SIGTERM) is former


def test_a_handler_that_a_library_installs_does_not_stay():
    with termination() as asked:
        with keeping_sigterm():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) is asked


def test_a_sigterm_that_a_library_turned_into_an_exit_is_one():
    with termination() as asked:
        with pytest.raises(KeyboardInterrupt), keeping_sigterm():
            raise SystemExit(signal.SIGTERM)
        assert asked.is_asked

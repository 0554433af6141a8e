"""Hypothesis profiles: the same examples every time where CI is set, fresh ones elsewhere.

And the option that makes the mutation tests run all of their cases, and who deals tests out.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small forwards; read when torch is imported

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are first imported

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/mutation --every-case``: each fault in every world it is listed with."""
    parser.addoption("--every-case", action="store_true", help="faults in all of their worlds")


@pytest.fixture(autouse=True, scope="module")
def runs_let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file caches for its own tests is let go behind them: a process has many files."""
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__:
            clear = getattr(value, "cache_clear", None)
            if clear is not None:
                clear()


class SharedRuns(LoadScopeScheduling):
    """Deals out whole files, since their tests share runs that a process keeps.

    All tests that start processes are one lot: such worlds would starve beside each other. Those of
    faults go by the world that a fault is let loose on. xdist's own groups write into an attribute
    of tests that this pytest does not read.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, name = nodeid.partition("::")
        if file.startswith("tests/e2e/"):
            return "tests/e2e"
        world = name.rpartition(" in ")[2] if file.startswith("tests/mutation/") else ""
        return world or file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedRuns:
    """Who deals tests out to the workers."""
    return SharedRuns(config, log)

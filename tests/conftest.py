"""Hypothesis profiles: the same examples every time where CI is set, fresh ones elsewhere.

And the option that makes the mutation tests run all of their cases.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # many small forwards; read when torch is imported

import pytest
from hypothesis import settings

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/mutation --every-case``: each fault in every world it is listed with."""
    parser.addoption("--every-case", action="store_true", help="faults in all of their worlds")


TOGETHER = ("mutation", "property", "verdict")
"""Folders whose tests share runs that a process keeps: a file's tests belong to one process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of such a file on one worker, those about one world of faults likewise."""
    for item in items:
        if item.path.parent.name in TOGETHER:
            params = getattr(item, "callspec", None) and item.callspec.params.values()
            worlds = [value.world for value in params or () if hasattr(value, "world")]
            item.add_marker(pytest.mark.xdist_group(worlds[0] if worlds else item.path.stem))

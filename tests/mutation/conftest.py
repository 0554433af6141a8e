"""Of the cases a plain run takes each fault once a stage; ``--every-case`` takes them all."""

from collections.abc import Sequence

import pytest

from tests.mutation.cases import Case


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of a fault and a stage that a test has another case of already."""
    if config.getoption("--every-case"):
        return
    taken: set[tuple[object, ...]] = set()
    kept, left = [], []
    for item in items:
        (kept if _is_first(item, taken) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _is_first(item: pytest.Item, taken: set[tuple[object, ...]]) -> bool:
    case = _case_of(item)
    if case is None:
        return True
    key = (item.function, case.fault.partition(":")[0], case.stage)
    is_new = key not in taken
    taken.add(key)
    return is_new


def _case_of(item: pytest.Item) -> Case | None:
    """The case that a test of this folder is asked with, if it is."""
    params: Sequence[object] = getattr(item, "callspec", None) and item.callspec.params.values()
    return next((value for value in params or () if isinstance(value, Case)), None)

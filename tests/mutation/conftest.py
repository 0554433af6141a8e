"""Of the cases a plain run takes each fault once a stage; ``--every-case`` takes them all."""

from collections.abc import Sequence

import pytest

from tests.mutation.cases import Case


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of a fault and a stage that a test has another case of already.

    Cases of one world come one after the other, since they share what the world has prepared.
    """
    if not config.getoption("--every-case"):
        taken: set[tuple[object, ...]] = set()
        chosen = [_is_first(item, taken) for item in items]
        left = [item for item, is_chosen in zip(items, chosen, strict=True) if not is_chosen]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item, is_chosen in zip(items, chosen, strict=True) if is_chosen]
    items[:] = _by_world(items)


def _is_first(item: pytest.Item, taken: set[tuple[object, ...]]) -> bool:
    case = _case_of(item)
    if case is None:
        return True
    key = (item.function, case.fault.partition(":")[0], case.stage)
    is_new = key not in taken
    taken.add(key)
    return is_new


def _by_world(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests in their order, the cases of each in that of their worlds."""
    first: dict[object, int] = {}

    def place(numbered: tuple[int, pytest.Item]) -> tuple[object, ...]:
        number, item = numbered
        case = _case_of(item)
        if case is None:
            return (number,)
        return first.setdefault(item.function, number), case.world, case.sets

    return [item for _, item in sorted(enumerate(items), key=place)]


def _case_of(item: pytest.Item) -> Case | None:
    """The case that a test of this folder is asked with, if it is."""
    params: Sequence[object] = getattr(item, "callspec", None) and item.callspec.params.values()
    return next((value for value in params or () if isinstance(value, Case)), None)

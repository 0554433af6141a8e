"""Loads the smallest shipped scenario for loopback, with changes."""

from collections.abc import Callable

import pytest

from scenarios.loader import LoadedScenario, load_scenario

SMOKE = "scenarios/smoke/ep2_dp.yaml"


@pytest.fixture(scope="session")
def load() -> Callable[..., LoadedScenario]:
    """``load("key=value", ..., inject=[...])``."""

    def load_smoke(*settings: str, inject: tuple[str, ...] = ()) -> LoadedScenario:
        overrides = ("run.runtime=loopback", *settings)
        return load_scenario(SMOKE, overrides=overrides, injects=inject)

    return load_smoke

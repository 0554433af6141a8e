"""Clean runs that tests of one worker share, and ways to spoil one traced tensor."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from moe.quant.ue8m0 import mn_major, row_major
from tests.verdict.clean_runs import SETTINGS, CleanRun, run_clean
from tests.verdict.deepep_v2_runs import FORMS, V2
from tests.verdict.layouts import LAYOUTS


@pytest.fixture(scope="session", params=SETTINGS)
def clean(request: pytest.FixtureRequest) -> CleanRun:
    """A clean run of each recipe; four ranks, one of them idle, or two."""
    return run_clean(*SETTINGS[request.param])


@pytest.fixture(scope="session", params=["ue8m0", "fp32"])
def quantised(request: pytest.FixtureRequest) -> CleanRun:
    """A clean run of each recipe that has scales."""
    return run_clean(*SETTINGS[request.param])


@pytest.fixture(scope="session")
def clean_ue8m0() -> CleanRun:
    return run_clean(*SETTINGS["ue8m0"])


@pytest.fixture(scope="session")
def clean_fp32() -> CleanRun:
    return run_clean(*SETTINGS["fp32"])


@pytest.fixture(scope="session")
def last_places() -> Callable[[Tensor, int, int, int], Tensor]:
    """A copy with one cell moved by whole last places, away from zero for a positive count."""

    def move(tensor: Tensor, row: int, column: int, places: int) -> Tensor:
        moved = tensor.clone()
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        moved.view(bits)[row, column] += places
        return moved

    return move


@pytest.fixture(scope="session")
def scaled_row() -> Callable[[Tensor, int, int], Tensor]:
    """A copy of scales with one row's first scale ``exponents`` powers of two larger."""

    def change(scale: Tensor, row: int, exponents: int) -> Tensor:
        if scale.dtype == torch.float32:
            moved = scale.clone()
            moved[row, 0] *= 2.0**exponents
            return moved
        words = row_major(scale)
        words.view(torch.uint8)[row, 0] += exponents
        return mn_major(words)

    return change


@pytest.fixture(scope="session")
def clean_layout() -> Callable[[str], CleanRun]:
    """A clean run of a layout by name; equal names share one."""
    return cache(lambda name: run_clean(*LAYOUTS[name].settings))


@pytest.fixture(scope="session")
def clean_form() -> Callable[[str], CleanRun]:
    """The clean run of a form of deepep_v2 by name, made once."""
    return cache(lambda name: run_clean(*V2, *FORMS[name]))

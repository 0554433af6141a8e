"""A dispatch format is known everywhere or nowhere."""

import pytest

from actors.dispatchers import DISPATCHERS
from moe.faults.tampering import CALLS_OF_FORMAT
from moe.formats import DispatchFormat, RunnerBackend
from moe.permute import PERMUTES


@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(DISPATCHERS.keys(), id="dispatchers"),
        pytest.param(CALLS_OF_FORMAT.keys(), id="calls"),
        pytest.param([form for form, _ in PERMUTES], id="permutes"),
    ],
)
def test_every_format_has_a_row(formats):
    assert sorted(formats) == sorted(DispatchFormat)


def test_every_runner_has_a_permute_for_every_format():
    assert PERMUTES.keys() == {
        (form, runner) for form in DispatchFormat for runner in RunnerBackend
    }

"""A slice of ``benchmarks/certified.py``: a row of each recipe and platform, and shipped files."""

from collections.abc import Iterator

import pytest

from benchmarks.certified import Line, combinations, run, summary
from benchmarks.false_alarms import Clean

LEAST = 0.95
SHIPPED = (
    "dispatch/standard_compact",
    "dispatch/flashinfer_extend",
    "topologies/hash_dp",
    "topologies/dp_ep_all_reduce",
    "topologies/dp_tp",
)
"""Those of which least is certified, one for each way that ranks' sums come together."""


def rows() -> Iterator[Clean]:
    """Of each recipe and platform one combination, with another dispatcher and activation each."""
    by_platform: dict[tuple[str, str], list[Clean]] = {}
    for one in combinations():
        recipe, platform, activation, _ = one.name.split(", ")
        if activation != "situ":
            by_platform.setdefault((recipe, platform), []).append(one)
    for number, choices in enumerate(by_platform.values()):
        yield choices[5 * number % len(choices)]


def shipped_rows() -> Iterator[Clean]:
    for name in SHIPPED:
        yield Clean(name=name, path=f"scenarios/{name}.yaml")


@pytest.mark.parametrize("one", [*rows(), *shipped_rows()], ids=lambda one: one.name)
def test_almost_all_is_certified_and_no_certified_cell_differs(one):
    line = run(one)
    assert (line.verdict, line.refusal, line.differing) == ("agree", None, 0)
    assert line.certified >= LEAST


def line(**facts: object) -> Line:
    told = {"name": "a", "about": "bf16 sm90", "certified": 0.96, "void": 0.0, "least": "sums"}
    rest = {"least_share": 0.9, "differing": 0, "refusal": None, "verdict": "agree", "summary": "s"}
    return Line(**(told | rest | facts))


def test_a_line_with_a_cell_that_differs_is_called_wrong():
    said = summary([line(), line(name="b", differing=3), line(name="c", refusal="too few")])
    assert said == [
        "bf16 sm90                   2 asked, least 96.0%; 1 refused",
        "WRONG: b: 3 cells; s",
        "refused: c: too few",
    ]

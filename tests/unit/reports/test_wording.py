import math

import pytest

from reports.html.wording import (
    byte_count,
    cell_number,
    isolated,
    number,
    plural,
    ranges,
    visible,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (0.004, "<.01"),
        (0.61, ".61"),
        (0.996, ".99"),
        (1.0, "1.0"),
        (2.44, "2.4"),
        (9.96, "10"),
        (77.4, "77"),
        (1234.0, "1234"),
        (312345.0, "3e5"),
        (1e30, "1e30"),
        (math.inf, "inf"),
        (math.nan, "NaN"),
    ],
)
def test_a_cell_holds_at_most_four_characters(value: float | None, text: str) -> None:
    assert cell_number(value) == text
    assert len(text) <= 4


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (-1.8125, "-1.8125"), (math.nan, "NaN"), (-math.inf, "-inf"), (1e-9, "1e-09")],
)
def test_a_number_is_shown_in_full(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([5, 0, 1, 7], "0-1, 5, 7")]
)
def test_ranks_are_told_as_runs(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")]
)
def test_bytes_are_told_in_binary_units(size: int, text: str) -> None:
    assert byte_count(size) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 ranks"), (1, "1 rank"), (1344, "1,344 ranks")])
def test_a_noun_agrees_with_its_count(count: int, text: str) -> None:
    assert plural(count, "rank") == text


def test_text_that_turns_the_reading_direction_is_spelled_out() -> None:
    assert visible("ep8\u202edp") == "ep8\\u202edp"


def test_terminal_escapes_are_spelled_out() -> None:
    assert visible("\x1b[31mred") == "\\u001b[31mred"


def test_long_text_is_cut_and_its_length_told() -> None:
    assert visible("x" * 10_000, limit=3) == "xxx… (10,000 characters)"


def test_isolated_text_is_escaped_inside_its_own_direction() -> None:
    assert isolated("<b>") == "<bdi>&lt;b&gt;</bdi>"

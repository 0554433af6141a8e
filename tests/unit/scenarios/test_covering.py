"""Covering arrays: held against every row of small products, one by one."""

from itertools import combinations, product

import pytest

from scenarios.covering import Conflict, cover

SIZES = (3, 2, 4, 2)
RULES = (
    Conflict(where={0: frozenset({0}), 2: frozenset({1, 3})}, because="first"),
    Conflict(where={1: frozenset({1}), 3: frozenset({1})}, because="second"),
    Conflict(where={0: frozenset({2}), 1: frozenset({0}), 3: frozenset({0})}, because="third"),
)


def has(row, conflict):
    return all(row[axis] in numbers for axis, numbers in conflict.where.items())


def refusals(row):
    return [
        Conflict(where={axis: frozenset({row[axis]}) for axis in rule.where}, because=rule.because)
        for rule in RULES
        if has(row, rule)
    ]


def parts(rows, strength):
    return {part for row in rows for part in combinations(enumerate(row), strength)}


EVERY = list(product(*map(range, SIZES)))
LEGAL = [row for row in EVERY if not any(has(row, rule) for rule in RULES)]


@pytest.mark.parametrize("strength", [1, 2, 3, 4])
def test_every_combination_that_a_legal_row_has_is_covered(strength):
    covering = cover(SIZES, strength, "0", refusals)
    assert set(covering.rows) <= set(LEGAL)
    assert parts(covering.rows, strength) == parts(LEGAL, strength)


@pytest.mark.parametrize("strength", [2, 3])
def test_what_is_asked_for_is_covered_or_impossible(strength):
    covering = cover(SIZES, strength, "0", refusals)
    possible, asked = len(parts(LEGAL, strength)), len(parts(EVERY, strength))
    assert (covering.num_asked, covering.num_covered) == (asked, possible)
    assert sum(covering.impossible.values()) == asked - possible > 0


def test_a_combination_that_one_rule_refuses_is_counted_with_that_rule():
    covering = cover(
        (2, 2),
        2,
        "0",
        lambda row: [],
        [Conflict(where={0: frozenset({1}), 1: frozenset({0, 1})}, because="left out")],
    )
    assert covering.rows == ((0, 0), (0, 1))
    assert covering.impossible == {("left out",): 2}


def test_a_combination_that_rules_refuse_only_together_is_counted_with_all_of_them():
    def one_of_two(row):
        if row[:2] != (0, 0):
            return []
        where = {0: frozenset({0}), 1: frozenset({0}), 2: frozenset({row[2]})}
        return [Conflict(where=where, because=f"rule {row[2]}")]

    covering = cover((2, 2, 2), 2, "0", one_of_two)
    assert covering.impossible == {("rule 0", "rule 1"): 1}


def test_pairs_are_far_fewer_than_rows():
    assert len(cover((4,) * 6, 2, "0", lambda row: []).rows) < 40 < 4**6


def test_a_product_too_large_to_look_at_is_covered():
    asked = []

    def refuse(row):
        asked.append(row)
        return (
            []
            if row[0] != row[1]
            else [
                Conflict(where={axis: frozenset({row[axis]}) for axis in (0, 1)}, because="equal")
            ]
        )

    covering = cover((5,) * 12, 2, "0", refuse)  # 244 million rows
    assert covering.impossible == {("equal",): 5}
    assert len(asked) < 1_000


def test_another_salt_chooses_other_rows_and_the_same_one_the_same():
    first, again, other = (
        cover((4,) * 4, 2, salt, lambda row: []).rows for salt in ("0", "0", "1")
    )
    assert first == again != other

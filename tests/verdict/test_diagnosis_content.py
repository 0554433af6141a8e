"""Rows are named by what they hold: marked tokens and random ones through one function."""

import pytest
import torch

from reports.verdict.diagnosis.content import Table, identify, listed, name_of
from reports.verdict.rows import Rows

TOKENS, COLUMNS = 24, 64


def random_tokens():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(TOKENS, COLUMNS, generator=generator).to(torch.bfloat16).double()


def marked_tokens():
    """All of one size; the number of a token stands in the signs of its columns."""
    bits = torch.arange(TOKENS)[:, None] >> torch.arange(COLUMNS).clamp(max=62) & 1
    return 1.0 - 2.0 * bits.double()


def table_of(values):
    return Table(values=values, rows=Rows.of_rank(0, len(values), torch.arange(len(values))))


EVERY_KIND = pytest.mark.parametrize("tokens", [random_tokens(), marked_tokens()], ids=["a", "b"])


@EVERY_KIND
def test_every_token_is_found_by_its_content(tokens):
    order = torch.arange(TOKENS).roll(7)
    match = identify(tokens[order], table_of(tokens))
    assert torch.equal(match.row, order)
    assert not match.is_ambiguous.any()


@EVERY_KIND
def test_a_row_with_one_other_value_is_nobodys(tokens):
    rows = tokens[3:4].clone()
    rows[0, 9] += 0.25
    assert identify(rows, table_of(tokens)).row.tolist() == [-1]


@EVERY_KIND
def test_equal_rows_of_two_tokens_are_ambiguous(tokens):
    held = torch.cat([tokens, tokens[3:4]])
    match = identify(tokens[3:5], table_of(held))
    assert match.row.tolist() == [3, 4]
    assert match.is_ambiguous.tolist() == [True, False]


def test_rows_that_are_no_numbers_are_equal():
    tokens = random_tokens()
    tokens[5, 1] = torch.nan
    assert identify(tokens[5:6].clone(), table_of(tokens)).row.tolist() == [5]


def test_zeros_of_either_sign_are_equal():
    tokens = torch.zeros(2, COLUMNS).double()
    tokens[1] = 1.0
    assert identify(-tokens[:1], table_of(tokens)).row.tolist() == [0]


def test_a_rule_may_allow_what_rounding_changes():
    tokens = random_tokens()
    rows = tokens[[4, 9]] * 1.001

    def near(which, candidate):
        return ((rows[which] - tokens[candidate]).abs() <= 0.002 * tokens[candidate].abs()).all(1)

    assert identify(rows, table_of(tokens), near).row.tolist() == [4, 9]


@pytest.mark.parametrize("count", [0, 3])
def test_nothing_is_found_in_an_empty_table(count):
    empty = table_of(torch.empty(0, COLUMNS).double())
    assert identify(random_tokens()[:count], empty).row.tolist() == [-1] * count


def test_rows_are_named_by_token_slot_and_other_rank():
    rows = Rows(
        rank=torch.tensor([0, 2, 1, 0]),
        token=torch.tensor([7, 8, -1, -1]),
        slot=torch.tensor([-1, 3, -1, 5]),
        expert=torch.tensor([-1, 1, -1, 4]),
    )
    said = [name_of(rows, at, 0) for at in range(4)]
    assert said == ["token 7", "token 8 slot 3 of rank 2", "padding of rank 1", "row 5 of expert 4"]


def test_a_long_list_is_cut_and_counted():
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"

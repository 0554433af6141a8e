"""Rows by token and slot as they were traced, decoded and compared block by block."""

from dataclasses import replace

import pytest
import torch

from moe.formats import Stage
from reports.verdict import route_values
from reports.verdict.canonical import NamedRows
from reports.verdict.topology_bits import parting_of
from tests.verdict.test_topology_bits import forward

KEY = (Stage.GEMM2, "output")


def rows(values, **fields):
    traced = torch.tensor(values, dtype=torch.bfloat16)
    return NamedRows(names=torch.arange(len(values)), traced=traced, **fields)


def test_codes_are_kept_beside_their_scales_and_decoded_where_they_are_read():
    codes = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0] * 4]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 0.5], [0.25, 2.0]])
    kept = NamedRows(names=torch.arange(2), traced=codes, scale=scale, group_size=2)
    assert kept.at(torch.tensor([1])).tolist() == [[4.0, 4.0, 32.0, 32.0]]
    assert kept.values[0].tolist() == [1.0, 2.0, 2.0, 4.0]


def test_gate_columns_of_shards_stand_side_by_side_then_up_columns():
    """Two shards of one row, each with two gate and two up columns."""
    sharded = rows([[1, 2, 5, 6], [3, 4, 7, 8]], shards=2, halves=2)
    whole = replace(sharded, names=torch.arange(1))
    assert whole.values.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert whole.width == 8


@pytest.mark.parametrize("cells_at_once", [1, 4, 1 << 24])
def test_the_first_cell_and_all_that_differ_are_found_whatever_the_blocks(
    monkeypatch, cells_at_once
):
    monkeypatch.setattr(route_values, "CELLS_AT_ONCE", cells_at_once)
    one, other = rows([[0, 0]] * 6), rows([[0, 0], [0, 0], [0, 3], [0, 0], [5, 0], [6, 6]])
    found = parting_of(KEY, one, other, top_k=2)
    assert (found.token, found.slot, found.column, found.other) == (1, 0, 1, 3.0)
    assert (found.cells, found.of) == (4, 12)


def test_cells_that_are_not_compared_are_no_difference():
    one, other = rows([[0, 0]] * 2), rows([[1, 0], [0, 2]])
    compared = torch.tensor([[False, True], [True, True]])
    found = parting_of(KEY, one, other, top_k=1, compared=compared)
    assert (found.token, found.column, found.cells) == (1, 1, 1)


def test_what_is_kept_of_a_forward_is_no_wider_than_its_traces():
    """float64 would be eight times as much as codes."""
    kept = forward("a2a").kept()
    assert {tuple(key) for key in kept.values} == {tuple(key) for key in forward("a2a").values}
    widest = {key: rows.traced.element_size() for key, rows in kept.values.items()}
    assert widest[Stage.PRE_PERMUTE, "rows.hidden_states"] == 1
    assert widest[KEY] == 2
    assert max(widest.values()) == 4

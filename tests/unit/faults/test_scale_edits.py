"""Scales are taken and put back in their form and layout; other rows keep theirs."""

import pytest
import torch

from moe.faults.scale_edits import (
    packed_rows,
    scaled_rows,
    with_scale,
    with_weight_scales,
)
from tests.unit.faults.scaled_values import (
    activated,
    bytes_of,
    codes,
    packed_weights,
    quantised_slabs,
    seen,
    words,
)
from tests.unit.faults.values import context, gathered, kept, permuted, received, slabs

PACKED = words((1, 2, 3, 4, 5), (9,) * 5, (6, 7, 8, 9, 10), (9,) * 5)


def test_packed_scales_are_exponents_of_live_rows_without_spare_bytes():
    rows = scaled_rows(activated(PACKED), context(seen()))
    assert rows.is_packed
    assert rows.stored.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


def test_fp32_scales_are_taken_as_they_are():
    rows = scaled_rows(permuted(scale=torch.tensor([[1.0], [2.0], [3.0], [4.0]])), context())
    assert not rows.is_packed
    assert rows.stored.tolist() == [[1.0], [3.0]]


def test_scales_of_slabs_are_those_of_their_first_rows():
    rows = scaled_rows(slabs((2, 1)), context())
    assert rows.stored.tolist() == [[0.0], [1.0], [4.0]]


def test_packed_scales_go_back_into_their_rows_and_their_layout():
    rows = scaled_rows(activated(PACKED), context(seen()))
    scale = rows.with_stored(rows.stored + 100)
    assert scale.stride() == PACKED.stride() == (1, 4)
    assert bytes_of(scale)[2] == [106, 107, 108, 109, 110, 0, 0, 0]
    assert bytes_of(scale)[1] == bytes_of(PACKED)[1]
    assert bytes_of(PACKED)[2][0] == 6


@pytest.mark.parametrize(
    "value",
    [
        activated(None),
        permuted(),
        received(),
        kept([[0]], [[0]]),
        gathered(),
        quantised_slabs(torch.ones(2, 4, 1), (0, 0)),
    ],
    ids=["activation", "segments", "bf16 wire", "standard", "flashinfer", "empty slabs"],
)
def test_rows_without_scales_have_none(value):
    assert scaled_rows(value, context(seen())) is None


def test_fp32_scales_are_not_packed():
    assert packed_rows(permuted(scale=torch.ones(4, 1)), context()) is None


@pytest.mark.parametrize("value", [permuted(scale=PACKED), received(scale=PACKED)])
def test_a_value_gets_other_scales_and_keeps_its_codes(value):
    other = torch.ones(1)
    changed = with_scale(value, other)
    rows, old = getattr(changed, "rows", changed), getattr(value, "rows", value)
    assert rows.hidden_states_scale is other
    assert rows.hidden_states is old.hidden_states


def test_a_value_gets_other_codes_with_its_scales():
    other = codes((1.0,))
    assert with_scale(permuted(), torch.ones(1), other).rows.hidden_states is other


def test_weights_whose_scales_nobody_changes_are_the_same():
    weights = packed_weights((100,))
    assert with_weight_scales(weights, lambda matrix: None) is weights


def test_both_matrices_get_other_scales_and_keep_their_values():
    weights, other = packed_weights((100,)), torch.ones(1)
    experts = with_weight_scales(weights, lambda matrix: other).experts
    assert experts.w13.scale is other
    assert experts.w2.scale is other
    assert experts.w13.values is weights.experts.w13.values
    assert experts.w13.group_size == 32

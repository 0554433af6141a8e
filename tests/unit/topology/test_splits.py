"""Chunks of rows against literals and against torch's own split."""

import pytest
import torch

from topology.splits import align, cp_shares, padded, tensor_split, tensor_split_sizes


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 16])
def test_chunks_are_those_of_torch(num_rows, num_chunks):
    expected = [tuple(chunk.tolist()) for chunk in torch.arange(num_rows).tensor_split(num_chunks)]
    assert list(tensor_split(tuple(range(num_rows)), num_chunks)) == expected


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [(0, (0, 0, 0, 0)), (2, (1, 1, 0, 0)), (7, (2, 2, 2, 1)), (8, (2, 2, 2, 2))],
)
def test_the_first_chunks_are_the_longer_ones(num_rows, expected):
    assert tensor_split_sizes(num_rows, 4) == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (8, ((0, 1, 6, 7), (2, 3, 4, 5))),
        (6, ((0, 1, 5), (2, 3, 4))),
        (1, ((0,), ())),
        (0, ((), ())),
    ],
)
def test_zigzag_pairs_an_early_block_with_a_late_one(rows, expected):
    assert cp_shares(tuple(range(rows)), 2, zigzag=True) == expected


def test_contiguous_shares_are_runs():
    assert cp_shares((0, 1, 2, 3, 4), 2, zigzag=False) == ((0, 1, 2), (3, 4))


@pytest.mark.parametrize("zigzag", [True, False], ids=["zigzag", "contiguous"])
def test_a_single_context_parallel_rank_holds_the_sequence_as_it_is(zigzag):
    assert cp_shares((0, 1, 2), 1, zigzag=zigzag) == ((0, 1, 2),)


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_counts_are_rounded_up_to_the_alignment(count, expected):
    assert align(count, 4) == expected


def test_padding_comes_after_the_rows():
    assert padded((3, 4), 4) == (3, 4, -1, -1)

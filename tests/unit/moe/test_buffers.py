"""Receive buffers keep what an earlier use left in them."""

import pytest
import torch

from moe.dispatch.buffers import MessageBuffers
from moe.poison import Fill, filled_with


@pytest.mark.parametrize(("fill", "byte"), [(Fill.NAN, 255), (Fill.LARGE, 0)])
def test_a_new_buffer_is_poison(fill, byte):
    with filled_with(fill):
        assert MessageBuffers(1).take(2, 3).tolist() == [[byte] * 3] * 2


def test_a_buffer_comes_back_as_it_was_left():
    buffers = MessageBuffers(1)
    buffers.take(2, 3)[1, 2] = 7
    assert buffers.take(2, 3)[1].tolist() == [255, 255, 7]


def test_buffers_are_taken_in_turn():
    buffers = MessageBuffers(2)
    for value in (1, 2):
        buffers.take(1, 1).fill_(value)
    assert [int(buffers.take(1, 1)) for _ in range(4)] == [1, 2, 1, 2]


def test_a_buffer_of_another_size_is_a_new_one():
    buffers = MessageBuffers(1)
    buffers.take(1, 2).fill_(1)
    assert buffers.take(2, 1).tolist() == [[255], [255]]


def test_chunks_have_room_for_their_height_each():
    chunks = MessageBuffers(1).take_chunks((2, 3), 4, 5)
    assert (chunks.counts.shape, chunks.counts.dtype) == ((2, 3), torch.int64)
    assert (chunks.rows.shape, chunks.rows.dtype) == ((2 * 3 * 4, 5), torch.uint8)


def test_counts_and_rows_of_chunks_come_back_as_they_were_left():
    buffers = MessageBuffers(1)
    first = buffers.take_chunks((1, 2), 2, 3)
    first.counts.copy_(torch.tensor([[2, 1]]))
    first.rows.copy_(torch.arange(12, dtype=torch.uint8).view(4, 3))
    again = buffers.take_chunks((1, 2), 2, 3)
    assert again.counts.tolist() == [[2, 1]]
    assert again.rows.flatten().tolist() == list(range(12))

"""Tensors side by side as bytes, and back."""

import pytest
import torch

from moe.dispatch.payload import pack_columns, unpack_columns
from moe.quant.ue8m0 import mn_major


def columns(num_rows: int) -> list[torch.Tensor]:
    """One tensor of each dtype and layout that a message holds."""
    ints = torch.arange(num_rows * 6).view(num_rows, 6)
    return [
        (ints % 120).to(torch.uint8).view(torch.float8_e4m3fn),
        ints.to(torch.bfloat16),
        ints[:, :3] - 1,
        ints[:, :3].to(torch.float32) / 3,
        mn_major(ints[:, :2].to(torch.int32)),
        mn_major(ints[:, :1].to(torch.int32)),
    ]


def test_a_row_is_as_wide_as_the_bytes_of_its_parts():
    # 6 e4m3, 6 bf16, 3 int64, 3 fp32, 2 + 1 int32.
    payload = pack_columns(columns(5))
    assert (payload.shape, payload.dtype) == ((5, 6 + 12 + 24 + 12 + 8 + 4), torch.uint8)


def test_the_bytes_of_a_row_stand_in_the_order_of_the_tensors():
    payload = pack_columns(
        [torch.tensor([[0x0201]], dtype=torch.int16), torch.tensor([[3, 4]], dtype=torch.uint8)]
    )
    assert payload.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_unpacking_gives_the_tensors_back(num_rows):
    given = columns(num_rows)
    got = unpack_columns(pack_columns(given), given)
    assert [part.dtype for part in got] == [part.dtype for part in given]
    assert all(
        torch.equal(a.contiguous().view(b.dtype).to(torch.float64), b.to(torch.float64))
        for a, b in zip(got, given, strict=True)
    )


def test_rows_may_be_reordered_on_the_way():
    given = columns(5)
    order = torch.tensor([4, 0, 2, 1, 3])
    got = unpack_columns(pack_columns(given)[order], given)
    assert torch.equal(got[2], given[2][order])


def test_nan_payloads_keep_their_bits():
    bits = torch.tensor([[0x7FC00001, -0x3FFFFF]], dtype=torch.int32)
    given = [bits.view(torch.float32)]
    assert torch.equal(unpack_columns(pack_columns(given), given)[0].view(torch.int32), bits)

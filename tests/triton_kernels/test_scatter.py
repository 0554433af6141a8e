"""Routes get the rows that torch gives them, and rows lie where torch lays them."""

import pytest
import torch

from moe import row_kernels
from moe.indices import scatter_index as torch_scatter_index
from moe.poison import Fill, filled_with
from moe.triton_kernels import scatter

IDS = torch.tensor([[0, 2], [2, -1], [7, 0], [2, 0]])


def routes(num_tokens, top_k, experts, dtype):
    generator = torch.Generator().manual_seed(11)
    return torch.randint(-1, experts + 2, (num_tokens, top_k), generator=generator).to(dtype)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [0, 3, 300])
@pytest.mark.parametrize("seed", [0, 5])
def test_rows_of_routes_are_torchs(device, dtype, num_tokens, seed):
    ids = routes(num_tokens, 4, 5, dtype)
    lengths = torch.tensor([700, 512, 1024, 640, 900])
    expected = torch_scatter_index(ids, lengths, seed)
    got = scatter.scatter_index(ids.to(device), lengths.to(device), seed)
    assert (got.dtype, got.tolist()) == (dtype, expected.tolist())


def test_segments_begin_where_the_one_before_ends(device):
    lengths = torch.tensor([4, 0, 128], device=device)
    index = scatter.scatter_index(IDS.to(device), lengths, seed=1)
    assert sorted(index[IDS.to(device) == 0].tolist()) == [0, 1, 2]
    assert sorted(index[IDS.to(device) == 2].tolist()) == [4, 5, 6]
    assert index[1, 1].item() == index[2, 0].item() == -1


def given(device):
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(9, 640, generator=generator)
    source = torch.tensor([8, 0, 0, 3, 7])
    places = torch.tensor([11, 2, 9, 4, 0])
    return rows.to(device), source.to(device), places.to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("zeroes", [False, True])
def test_segments_are_torchs_padding_included(device, dtype, zeroes):
    rows, source, places = given(device)
    sent = rows.to(dtype)
    expected = row_kernels.scatter_rows(sent, source, places, 16, zeroes_padding=zeroes)
    got = scatter.scatter_rows(sent, source, places, 16, zeroes_padding=zeroes)
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("fill", Fill)
def test_slabs_are_torchs_whatever_the_fill(device, fill):
    rows, source, places = given(device)
    with filled_with(fill):
        expected = row_kernels.scatter_slabs(rows, source, places, 3, 4)
        got = scatter.scatter_slabs(rows, source, places, 3, 4)
    assert got.shape == (3, 4, 640)
    assert torch.equal(bits(got), bits(expected))


def words(device):
    storage = torch.arange(2 * 12, dtype=torch.int32).view(2, 12)
    return storage.to(device).T[:9]  # MN-major, as packed scales are


@pytest.mark.parametrize("scale", ["fp32", "packed"])
def test_scales_of_segments_have_torchs_bits_and_strides(device, scale):
    rows, source, places = given(device)
    sent = words(device) if scale == "packed" else rows[:, :5].contiguous()
    expected = row_kernels.scatter_scales(sent, source, places, 14)
    got = scatter.scatter_scales(sent, source, places, 14)
    assert got.stride() == expected.stride()
    assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize("scale", ["fp32", "packed"])
def test_scales_of_slabs_have_torchs_bits_and_strides(device, scale):
    rows, source, places = given(device)
    sent = words(device) if scale == "packed" else rows[:, :5].contiguous()
    expected = row_kernels.scatter_slab_scales(sent, source, places, 3, 4)
    got = scatter.scatter_slab_scales(sent, source, places, 3, 4)
    assert got.stride() == expected.stride()
    assert torch.equal(bits(got), bits(expected))


def test_indices_may_be_columns_of_a_table(device):
    rows, source, places = given(device)
    table = torch.stack([source, places], dim=1)
    got = scatter.scatter_rows(rows, table[:, 0], table[:, 1], 16)
    assert torch.equal(bits(got), bits(row_kernels.scatter_rows(rows, source, places, 16)))


def test_no_row_leaves_padding_alone(device):
    rows, source, places = given(device)
    assert scatter.scatter_rows(rows, source[:0], places[:0], 4).isnan().all()

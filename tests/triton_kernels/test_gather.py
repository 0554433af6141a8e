"""Weighted sums and weighed rows are torch's, bit by bit."""

import pytest
import torch

from moe import row_kernels
from moe.fold import fold_topk_weights as torch_fold
from moe.triton_kernels.gather import fold_topk_weights, weigh_rows


def grouped(num_rows=40, width=640):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_rows, width, generator=generator).to(torch.bfloat16)


def routes(num_tokens=21, top_k=6, num_rows=40):
    generator = torch.Generator().manual_seed(8)
    index = torch.randint(0, num_rows, (num_tokens, top_k), generator=generator)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    is_route = torch.rand(num_tokens, top_k, generator=generator) < 0.7
    is_route[4] = False
    return index, weights, is_route


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_sums_are_torchs_on_a_cpu(device, dtype, factor):
    rows, (index, weights, is_route) = grouped(), routes()
    expected = torch_fold(rows, index, weights, is_route, factor)
    args = rows, index.to(dtype), weights, is_route
    got = fold_topk_weights(*(tensor.to(device) for tensor in args), factor)
    assert torch.equal(got.cpu().view(torch.int16), expected.view(torch.int16))


def test_slots_are_added_in_ascending_order(device):
    rows = torch.tensor([[1.0], [2.0**30], [-(2.0**30)]], dtype=torch.bfloat16, device=device)
    index = torch.tensor([[0, 1, 2], [1, 2, 0]], device=device)
    weights = torch.ones(2, 3, device=device)
    got = fold_topk_weights(rows, index, weights, weights > 0)
    assert got.tolist() == [[0.0], [1.0]]


def test_products_are_rounded_before_they_are_added(device):
    """fl(fl(a * b) - 1) is 2^-7; a fused sum would keep a * b's last bit of 2^-16 as well."""
    a = 1 + 2.0**-7
    rows = torch.tensor([[-1.0 - 2.0**-7], [a]], dtype=torch.bfloat16, device=device)
    index = torch.tensor([[0, 1]], device=device)
    weights = torch.tensor([[1.0, 1 + 2.0**-23]], device=device)
    got = fold_topk_weights(rows, index, weights, weights > 0)
    product = torch.tensor(a) * torch.tensor(1 + 2.0**-23)
    assert got.item() == (product - a).item() == 2.0**-23


def test_a_slot_that_is_no_route_is_not_read(device):
    rows = torch.tensor([[torch.nan], [3.0]], dtype=torch.bfloat16, device=device)
    index = torch.tensor([[0, 1]], device=device)
    weights = torch.tensor([[torch.nan, 2.0]], device=device)
    is_route = torch.tensor([[False, True]], device=device)
    assert fold_topk_weights(rows, index, weights, is_route).tolist() == [[6.0]]


def test_an_index_of_minus_one_is_the_last_row_as_upstream(device):
    rows = torch.tensor([[1.0], [3.0]], dtype=torch.bfloat16, device=device)
    weights = torch.ones(1, 1, device=device)
    got = fold_topk_weights(rows, torch.tensor([[-1]], device=device), weights, weights > 0)
    assert got.tolist() == [[3.0]]


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(3, 0), (0, 4)])
def test_without_a_row_or_a_token_there_is_nothing_to_add(device, num_tokens, num_rows):
    rows = torch.zeros(num_rows, 8, dtype=torch.bfloat16, device=device)
    index = torch.full((num_tokens, 2), -1, device=device)
    got = fold_topk_weights(rows, index, torch.ones(num_tokens, 2, device=device), index >= 0)
    assert got.tolist() == [[0.0] * 8] * num_tokens


def test_weighed_rows_may_be_named_by_columns_of_a_table(device):
    rows = torch.tensor([[1.0], [3.0]], dtype=torch.bfloat16, device=device)
    table = torch.tensor([[1, 0], [0, 1]], device=device)
    weights = torch.tensor([0.5, 2.0], device=device)
    assert weigh_rows(rows, table[:, 0], table[:, 1], weights).tolist() == [[1.5], [2.0]]


def test_weighed_rows_are_torchs_poison_included(device):
    rows = grouped(12, 600)
    source, places = torch.tensor([3, 0, 11, 7]), torch.tensor([9, 1, 4, 0])
    weights = torch.rand(10, generator=torch.Generator().manual_seed(1))
    args = rows, source, places, weights
    expected = row_kernels.weigh_rows(*args)
    got = weigh_rows(*(tensor.to(device) for tensor in args)).cpu()
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))

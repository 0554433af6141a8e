"""Equality of stage values: every bit of every tensor, and nothing else."""

import pytest
import torch

from moe.faults.bits import same_bits, same_values
from moe.stages import CombineInput, CombineOutput, Gemm2Output

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 3.0], False),
        ([NAN], [NAN], True),
        ([0.0], [-0.0], False),
        ([1.0], [1.0, 1.0], False),
        ([], [], True),
    ],
    ids=["equal", "another value", "NaN", "signed zero", "another shape", "no value"],
)
def test_bits_decide(one, other, same):
    assert same_bits(torch.tensor(one), torch.tensor(other)) is same


def test_dtypes_must_be_the_same():
    assert not same_bits(torch.zeros(2, dtype=torch.int32), torch.zeros(2))


def test_float8_and_strided_tensors_are_compared():
    codes = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    assert same_bits(codes, codes.clone())
    assert same_bits(torch.arange(4).view(2, 2).t(), torch.tensor([[0, 2], [1, 3]]))


def test_a_copy_of_a_value_is_the_same_value():
    assert same_values(Gemm2Output(output=torch.ones(2)), Gemm2Output(output=torch.ones(2)))


def test_one_other_tensor_makes_another_value():
    assert not same_values(Gemm2Output(output=torch.ones(2)), Gemm2Output(output=torch.zeros(2)))


def test_a_tensor_more_makes_another_value():
    folded = CombineInput(partial=torch.ones(1))
    pending = CombineInput(partial=torch.ones(1), pending_weights=torch.ones(1))
    assert not same_values(folded, pending)


def test_names_of_tensors_count():
    assert not same_values(Gemm2Output(output=torch.ones(1)), CombineOutput(routed=torch.ones(1)))

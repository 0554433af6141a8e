"""What is taken away after its last use, and that nobody reads it later."""

import pytest
import torch

from moe.formats import Stage
from moe.lifetimes import LAST_USES, ReleasingTap, copied, last_use
from moe.poison import Fill, filled_with, poison
from moe.quant.ue8m0 import mn_major
from moe.stages import CombineOutput, Gemm1Output, Gemm2Output


def untouched(stage, value):
    return value


@pytest.mark.parametrize(
    ("stage", "name", "expected"),
    [
        (Stage.GLUE_IN, "hidden_states", Stage.TAIL),
        (Stage.GLUE_IN, "wire", Stage.GLUE_IN),
        (Stage.DISPATCH, "handle.source_row", Stage.COMBINE),
        (Stage.DISPATCH, "topk_ids", Stage.PRE_PERMUTE),
        (Stage.PRE_PERMUTE, "rows.hidden_states", Stage.GEMM1),
        (Stage.PRE_PERMUTE, "rows.m_indices", Stage.GEMM2),
        (Stage.PRE_PERMUTE, "restore.output_index", Stage.POST_PERMUTE),
        (Stage.ACTIVATION, "activation", Stage.ACTIVATION),
        (Stage.GLUE_OUT, "hidden_states", Stage.GLUE_OUT),
    ],
)
def test_the_last_reader_of_a_tensor_is(stage, name, expected):
    assert last_use(stage, name) is expected


def test_no_tensor_is_read_before_it_exists():
    assert all(
        last.position > stage.position
        for stage, uses in LAST_USES.items()
        for last in uses.values()
    )


def test_what_is_handed_on_is_a_copy():
    value = Gemm1Output(gate_up=torch.ones(2, 2))
    lent = ReleasingTap(untouched)(Stage.GEMM1, value)
    lent.gate_up.zero_()
    assert value.gate_up.tolist() == [[1, 1], [1, 1]]


def test_a_tensor_lives_until_its_last_reader_is_through_and_no_longer():
    tap = ReleasingTap(untouched)
    output = tap(Stage.GEMM2, Gemm2Output(output=torch.ones(1, 2))).output
    assert output.tolist() == [[1, 1]]
    tap(Stage.POST_PERMUTE, CombineOutput(routed=torch.ones(1, 2)))
    assert bool(output.isnan().all())


def test_what_the_last_reader_hands_on_is_safe_even_where_it_is_its_input():
    tap = ReleasingTap(untouched)
    output = tap(Stage.GEMM2, Gemm2Output(output=torch.ones(1, 2))).output
    handed_on = tap(Stage.POST_PERMUTE, CombineOutput(routed=output)).routed
    assert handed_on.tolist() == [[1, 1]]


def test_a_copy_keeps_gaps_between_columns():
    words = mn_major(torch.arange(5, dtype=torch.int32).view(5, 1))
    copy = copied(words)
    assert (copy.stride(), copy.tolist()) == (words.stride(), words.tolist())


@pytest.mark.parametrize(
    ("dtype", "nan", "large"),
    [
        (torch.bfloat16, None, torch.finfo(torch.bfloat16).max / 2),
        (torch.float32, None, torch.finfo(torch.float32).max / 2),
        (torch.float8_e4m3fn, None, 448.0),
        (torch.int32, 2**31 - 1, -(2**31)),
        (torch.uint8, 255, 0),
    ],
    ids=str,
)
def test_the_two_fills_differ_in_every_element(dtype, nan, large):
    fills = []
    for fill in Fill:
        with filled_with(fill):
            fills.append(poison(torch.empty(3, dtype=dtype)).to(torch.float64))
    expected = float("nan") if nan is None else float(nan)
    assert torch.equal(fills[0].nan_to_num(-1), torch.full_like(fills[0], expected).nan_to_num(-1))
    assert torch.allclose(fills[1], torch.full_like(fills[1], large), rtol=1e-2)


def test_the_fill_in_force_ends_with_its_block():
    with filled_with(Fill.LARGE):
        pass
    assert bool(poison(torch.empty(1)).isnan())

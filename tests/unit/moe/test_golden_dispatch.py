"""What the golden's dispatch leaves of a token: groups, scales of the wire, padding."""

from dataclasses import replace

import pytest
import torch

from moe.formats import GatedActivation, QuantRecipe, ScaleFormat, ScoringFunc
from moe.golden import GoldenModel, GoldenRouting, GoldenTrace, golden_forward

WIDTH = 128
FP8 = GoldenModel(
    routing=GoldenRouting(top_k=1, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=False),
    routed_scaling_factor=1.0,
    activation=GatedActivation(),
    recipe=QuantRecipe.FP8_BLOCK128,
    scale_format=ScaleFormat.UE8M0,
)
MXFP8 = replace(FP8, recipe=QuantRecipe.MXFP8)


class Identity:
    """One expert as wide as its rows, with gate and up equal to them; no shared expert."""

    correction_bias = None
    tid2eid = None
    gate_weight = torch.zeros(1, WIDTH, dtype=torch.float64)

    def __init__(self, width: int = WIDTH) -> None:
        self.intermediate_size = width

    def expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        eye = torch.eye(self.intermediate_size, dtype=torch.float64)
        return torch.cat([eye, eye]), eye

    def shared(self) -> None:
        return None


def forward(model: GoldenModel, cells: dict[int, float], width: int = WIDTH) -> GoldenTrace:
    """A token with these cells, zero elsewhere."""
    token = torch.zeros(1, WIDTH)
    for column, value in cells.items():
        token[0, column] = value
    ids = torch.zeros(1, 1, dtype=torch.int64)
    return golden_forward(model, Identity(width), token, rounding=True, topk_ids=ids)


@pytest.mark.parametrize(
    ("wire", "expected"),
    [(None, 9.0), (ScaleFormat.UE8M0, 9.0), (ScaleFormat.FP32, 10.0)],
    ids=["same", "ue8m0", "fp32"],
)
def test_a_wire_with_other_scales_rounds_once_more(wire, expected):
    # 9.375 / 0.5 = 18.75 goes to the code 18. Over the fp32 scale 134 / 448 it is 31.3, which
    # goes to 32; that is 9.57, over 0.5 19.1, which goes to 20.
    trace = forward(replace(FP8, wire_format=wire), {0: 134.0, 1: 9.375})
    assert trace.dispatched[0, :2].tolist() == [128.0, expected]


@pytest.mark.parametrize(("group", "kept"), [(None, 2.0**-10), (32, 2.0**-10), (128, 0.0)])
def test_the_group_in_front_of_the_experts_may_be_the_wires(group, kept):
    # Beside 448 a scale is 1, and 2^-10 half the smallest code: a tie that goes to zero.
    trace = forward(replace(MXFP8, input_group=group), {0: 448.0, 40: 2.0**-10})
    assert trace.dispatched[0, [0, 40]].tolist() == [448.0, kept]


def test_rows_of_padded_experts_end_in_zeros_and_outputs_lose_them():
    model = replace(FP8, expert_hidden_size=2 * WIDTH)
    trace = forward(model, {0: 8.0}, 2 * WIDTH)
    assert (trace.dispatched.shape, trace.expert_output.shape) == ((1, 256), (1, 1, 256))
    assert trace.dispatched[0, WIDTH:].count_nonzero() == 0
    assert (trace.routed.shape, trace.output.shape) == ((1, WIDTH), (1, WIDTH))


def test_padding_changes_no_value():
    plain = forward(FP8, {0: 8.0, 5: -3.0})
    wide = forward(replace(FP8, expert_hidden_size=2 * WIDTH), {0: 8.0, 5: -3.0}, 2 * WIDTH)
    assert torch.equal(wide.output, plain.output)

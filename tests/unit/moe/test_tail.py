"""Shared expert, scaling factor, addition."""

from functools import partial

import pytest
import torch

from moe.formats import GatedActivation, ScaleFormat
from moe.grouped_gemm import TorchGemm
from moe.quant.fp8 import group_scales, quantize_groups
from moe.runner import LoadedExperts, RunnerCore
from moe.stages import CombineOutput, TailOutput
from moe.tail import ReplicatedSharedTail, SharedAfterSumTail, SharedBeforeSumTail, SharedExpert
from moe.weights import ExpertMatrix

WIDTH = 128


def doubling_expert() -> LoadedExperts:
    """gate = up = x and w2 = 2: the output is 2 * silu(x) * x."""
    eye = torch.eye(WIDTH, dtype=torch.bfloat16)
    gemm = TorchGemm()
    return LoadedExperts(
        w13=gemm.load(ExpertMatrix(values=torch.cat([eye, eye])[None], scale=None)),
        w2=gemm.load(ExpertMatrix(values=2 * eye[None], scale=None)),
    )


def shared_expert() -> SharedExpert:
    runner = RunnerCore(
        gemm=TorchGemm(),
        activation=GatedActivation(),
        scale_format=ScaleFormat.NONE,
        quantize=None,
    )
    return SharedExpert(weights=doubling_expert(), runner=runner, quantize=None)


def tail(factor: float, *, shared: bool) -> ReplicatedSharedTail:
    return ReplicatedSharedTail(
        shared=shared_expert() if shared else None,
        routed_scaling_factor=factor,
    )


def finished(factor: float, routed: float, *, x: float = 10.0, shared: bool = True) -> float:
    hidden = torch.full((1, WIDTH), x, dtype=torch.bfloat16)
    combined = CombineOutput(routed=torch.full((1, WIDTH), routed, dtype=torch.bfloat16))
    return tail(factor, shared=shared).finish(hidden, combined).output[0, 0].item()


@pytest.mark.parametrize(
    ("factor", "routed", "expected"), [(1.0, 3.0, 3.0), (2.5, 3.0, 7.5), (2.5, -1.0, -2.5)]
)
def test_without_a_shared_expert_the_routed_branch_is_scaled(factor, routed, expected):
    assert finished(factor, routed, shared=False) == expected


def test_the_shared_expert_is_added_unscaled():
    # silu(10) is 10 in bf16, so the shared branch is 200.
    assert finished(2.5, 4.0) == 210.0


def test_the_sum_is_rounded_to_bf16_once():
    # 0.5 * (1 + 2^-10) alone would round back to 0.5, and 200.5 is a tie that goes to 200.
    assert finished(1 + 2.0**-10, 0.5) == 201.0


def test_every_step_of_the_shared_expert_is_handed_on():
    hidden = torch.full((1, WIDTH), 10.0, dtype=torch.bfloat16)
    combined = CombineOutput(routed=torch.zeros(1, WIDTH, dtype=torch.bfloat16))
    steps = tail(1.0, shared=True).finish(hidden, combined).shared
    assert steps.input is hidden
    assert steps.gate_up.tolist() == [[10.0] * 2 * WIDTH]
    assert steps.activation.tolist() == [[100.0] * WIDTH]
    assert steps.output.tolist() == [[200.0] * WIDTH]


def test_the_shared_experts_input_is_quantised_where_the_recipe_does():
    quantize = partial(quantize_groups, scale_format=ScaleFormat.UE8M0)
    gemm = TorchGemm()
    ones = torch.ones(1, 2 * WIDTH, WIDTH).to(torch.float8_e4m3fn)
    scale = quantize(torch.full((2 * WIDTH, WIDTH), 448.0)).scale[None]
    shared = LoadedExperts(
        w13=gemm.load(ExpertMatrix(values=ones, scale=scale)),
        w2=gemm.load(ExpertMatrix(values=ones[:, :WIDTH], scale=scale[:, :WIDTH])),
    )
    runner = RunnerCore(
        gemm=gemm,
        activation=GatedActivation(),
        scale_format=ScaleFormat.UE8M0,
        quantize=quantize,
    )
    hidden = torch.full((3, WIDTH), 0.5, dtype=torch.bfloat16)
    steps = SharedExpert(weights=shared, runner=runner, quantize=quantize)(hidden)
    # 0.5 / 448 rounded up is 2^-9; the code is 0.5 / 2^-9 = 256.
    assert steps.input.to(torch.float32).unique().tolist() == [256.0]
    assert group_scales(steps.input_scale, 1).tolist() == [[2.0**-9]] * 3
    assert steps.gate_up.unique().tolist() == [64.0]


def test_fp32_scales_of_the_shared_expert_have_their_rows_along_the_fastest_axis():
    quantize = partial(quantize_groups, scale_format=ScaleFormat.FP32)
    gemm = TorchGemm()
    ones = torch.ones(1, 2 * WIDTH, WIDTH).to(torch.float8_e4m3fn)
    shared = LoadedExperts(
        w13=gemm.load(ExpertMatrix(values=ones, scale=torch.ones(1, 2, 1))),
        w2=gemm.load(ExpertMatrix(values=ones[:, :WIDTH], scale=torch.ones(1, 1, 1))),
    )
    runner = RunnerCore(
        gemm=gemm,
        activation=GatedActivation(),
        scale_format=ScaleFormat.FP32,
        quantize=quantize,
    )
    hidden = torch.full((3, WIDTH), 0.5, dtype=torch.bfloat16)
    steps = SharedExpert(weights=shared, runner=runner, quantize=quantize)(hidden)
    assert steps.input_scale.stride() == steps.hidden_states_scale.stride() == (1, 4)


def test_no_tokens_make_no_rows():
    empty = torch.zeros(0, WIDTH, dtype=torch.bfloat16)
    assert tail(2.0, shared=True).finish(empty, CombineOutput(routed=empty)).output.shape == (
        0,
        WIDTH,
    )


def filled(value: float) -> torch.Tensor:
    return torch.full((1, WIDTH), value, dtype=torch.bfloat16)


def doubled(rows: torch.Tensor) -> torch.Tensor:
    """A sum over two ranks that give the same."""
    return 2 * rows


def values(output: TailOutput) -> tuple[float, float | None, float]:
    """(summand, reduced, output), each of them the same in all columns."""
    tensors = (output.summand, output.reduced, output.output)
    assert all(t is None or t.unique().numel() == 1 for t in tensors)
    summand, reduced, out = (None if t is None else t[0, 0].item() for t in tensors)
    return summand, reduced, out


@pytest.mark.parametrize(
    ("has_shared", "reduce", "expected"),
    [
        # The shared branch of x = 10 is 200, the routed partial 3.
        (True, doubled, (203.0, 406.0, 406.0)),
        (True, None, (203.0, None, 203.0)),
        (False, doubled, (3.0, 6.0, 6.0)),
        (False, None, (3.0, None, 3.0)),
    ],
    ids=["shared_summed_here", "shared_summed_later", "summed_here", "summed_later"],
)
def test_a_part_of_the_shared_expert_is_summed_with_the_partial(has_shared, reduce, expected):
    before = SharedBeforeSumTail(shared=shared_expert() if has_shared else None, reduce=reduce)
    finished = before.finish(filled(10.0), CombineOutput(routed=filled(3.0)))
    assert values(finished) == expected
    assert (finished.shared is not None) == has_shared


def test_a_partial_with_its_shared_part_is_rounded_to_bf16_before_the_sum():
    # 200 + 0.5 is a tie that goes to 200. Not rounded it would be 201.5 after the sum, so 202.
    before = SharedBeforeSumTail(shared=shared_expert(), reduce=lambda rows: rows + 1)
    finished = before.finish(filled(10.0), CombineOutput(routed=filled(0.5)))
    assert values(finished) == (200.0, 201.0, 201.0)


def test_the_whole_shared_expert_is_added_to_the_finished_sum_once():
    after = SharedAfterSumTail(shared=shared_expert(), reduce=doubled)
    finished = after.finish(filled(10.0), CombineOutput(routed=filled(3.0)))
    assert values(finished) == (3.0, 6.0, 206.0)


def test_behind_an_all_to_all_nothing_is_left_to_sum():
    finished = tail(2.0, shared=True).finish(filled(10.0), CombineOutput(routed=filled(3.0)))
    assert (finished.summand, finished.reduced) == (None, None)


@pytest.mark.parametrize("kind", ["before", "after"])
def test_no_rows_are_reduced_all_the_same(kind):
    calls = []

    def reduce(rows: torch.Tensor) -> torch.Tensor:
        calls.append(rows.shape)
        return rows

    tails = {"before": SharedBeforeSumTail, "after": SharedAfterSumTail}
    empty = torch.zeros(0, WIDTH, dtype=torch.bfloat16)
    tails[kind](shared=shared_expert(), reduce=reduce).finish(empty, CombineOutput(routed=empty))
    assert calls == [(0, WIDTH)]

"""GEMM1, activation, GEMM2 in both layouts: where they agree bit by bit, and where they round."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from moe.activation import silu_and_mul, silu_rounded_and_mul, unrounded_silu_and_mul
from moe.formats import ScaleFormat, Stage
from moe.grouped_gemm import TorchGemm
from moe.quant.fp8 import quantize_blocks, quantize_groups, quantize_groups_fused
from moe.runner import LoadedExperts, RunnerCore
from moe.slabs import spread_slab_scales, spread_slabs
from moe.stages import ActivationOutput, ContigInput, MaskedInput, RunnerInput
from moe.weights import ExpertMatrix, requantize_ue8m0

WIDTH, HEIGHT = 128, 256
COUNTS = [3, 0, 2]
LIVE = torch.tensor([0, 1, 2, 512, 513])
"""Places of the five rows in three slabs."""
FORMATS = pytest.mark.parametrize(
    "scale_format", [ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0]
)
QUANTISED = pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
LIMITS = pytest.mark.parametrize("limit", [None, 1.0], ids=["open", "clamped"])


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def matrix(seed: int, n: int, scale_format: ScaleFormat) -> ExpertMatrix:
    values = drawn(seed, len(COUNTS), n, WIDTH) / 8
    if scale_format is ScaleFormat.NONE:
        return ExpertMatrix(values=values, scale=None)
    blocks = quantize_blocks(values, ScaleFormat.FP32)
    quantized = ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
    return requantize_ue8m0(quantized) if scale_format is ScaleFormat.UE8M0 else quantized


def runner(scale_format: ScaleFormat, limit: float | None) -> RunnerCore:
    plain = RunnerCore(gemm=TorchGemm(), quantize=None, swiglu_limit=limit)
    if scale_format is ScaleFormat.NONE:
        return plain
    return replace(
        plain,
        quantize=partial(quantize_groups, scale_format=scale_format),
        quantize_fused=partial(quantize_groups_fused, scale_format=scale_format),
    )


def rows_in(layout: type[RunnerInput], scale_format: ScaleFormat) -> RunnerInput:
    """Five rows of experts 0, 0, 0, 2, 2."""
    rows, scale = 4 * drawn(3, 5, WIDTH), None
    if scale_format is not ScaleFormat.NONE:
        quantized = quantize_groups(rows, scale_format)
        rows, scale = quantized.values, quantized.scale
    if layout is ContigInput:
        return ContigInput(
            hidden_states=rows,
            hidden_states_scale=scale,
            m_indices=torch.tensor([0, 0, 0, 2, 2], dtype=torch.int32),
            live_rows=torch.arange(5),
        )
    return MaskedInput(
        hidden_states=spread_slabs(rows, LIVE, 3, HEIGHT),
        hidden_states_scale=None if scale is None else spread_slab_scales(scale, LIVE, 3, HEIGHT),
        masked_m=torch.tensor(COUNTS, dtype=torch.int32),
        expected_m=1,
    )


def run(
    layout: type[RunnerInput], scale_format: ScaleFormat, limit: float | None
) -> dict[Stage, object]:
    """What each stage handed on."""
    seen = {}

    def tap(stage, value):
        seen[stage] = value
        return value

    loaded = LoadedExperts(
        w13=TorchGemm().load(matrix(1, 2 * WIDTH, scale_format)),
        w2=TorchGemm().load(matrix(2, WIDTH, scale_format)),
    )
    runner(scale_format, limit).run(rows_in(layout, scale_format), loaded, tap)
    return seen


def live(slabs: Tensor) -> Tensor:
    """The five real rows of slabs."""
    return torch.cat([slabs[0, :3], slabs[2, :2]])


@pytest.mark.parametrize("layout", [ContigInput, MaskedInput])
def test_each_stage_is_tapped_in_order(layout):
    assert list(run(layout, ScaleFormat.FP32, 1.0)) == [Stage.GEMM1, Stage.ACTIVATION, Stage.GEMM2]


@FORMATS
@LIMITS
def test_gemm1_gives_both_layouts_the_same_bits(scale_format, limit):
    masked, contig = (run(layout, scale_format, limit) for layout in (MaskedInput, ContigInput))
    assert torch.equal(live(masked[Stage.GEMM1].gate_up), contig[Stage.GEMM1].gate_up)


@LIMITS
def test_bf16_rows_have_the_same_bits_in_both_layouts(limit):
    masked, contig = (run(x, ScaleFormat.NONE, limit) for x in (MaskedInput, ContigInput))
    assert torch.equal(live(masked[Stage.GEMM2].output), contig[Stage.GEMM2].output)


@QUANTISED
@LIMITS
def test_a_quantised_activation_differs_between_the_layouts(scale_format, limit):
    masked, contig = (run(layout, scale_format, limit) for layout in (MaskedInput, ContigInput))
    assert not torch.equal(
        live(masked[Stage.ACTIVATION].activation).float(),
        contig[Stage.ACTIVATION].activation.float(),
    )


@FORMATS
@LIMITS
def test_outputs_keep_the_layout_of_the_rows(scale_format, limit):
    seen = run(MaskedInput, scale_format, limit)
    middle = seen[Stage.ACTIVATION]
    assert seen[Stage.GEMM1].gate_up.shape == (3, HEIGHT, 2 * WIDTH)
    assert middle.activation.shape == middle.hidden_states.shape == (3, HEIGHT, WIDTH)
    assert seen[Stage.GEMM2].output.shape == (3, HEIGHT, WIDTH)


@FORMATS
@LIMITS
def test_rows_that_are_not_real_stay_poison_in_every_stage(scale_format, limit):
    seen = run(MaskedInput, scale_format, limit)
    padding = torch.ones(3 * HEIGHT, dtype=torch.bool).index_fill_(0, LIVE, False)
    middle = seen[Stage.ACTIVATION]
    for slabs in (middle.activation, middle.hidden_states, seen[Stage.GEMM2].output):
        is_nan = slabs.flatten(0, 1).float().isnan()
        assert bool(is_nan[padding].all())
        assert not bool(is_nan[LIVE].any())


def test_contig_rows_are_activated_with_one_rounding():
    seen = run(ContigInput, ScaleFormat.FP32, 1.0)
    activation, gate_up = seen[Stage.ACTIVATION].activation, seen[Stage.GEMM1].gate_up
    assert torch.equal(activation, silu_and_mul(gate_up, 1.0))


@QUANTISED
def test_masked_rows_with_a_limit_are_quantised_without_a_rounding_to_bf16(scale_format):
    seen = run(MaskedInput, scale_format, 1.0)
    middle: ActivationOutput = seen[Stage.ACTIVATION]
    activation = unrounded_silu_and_mul(live(seen[Stage.GEMM1].gate_up), 1.0)
    assert middle.activation.dtype == torch.float32
    assert torch.equal(live(middle.activation), activation)
    expected = quantize_groups_fused(activation, scale_format)
    assert torch.equal(live(middle.hidden_states).float(), expected.values.float())
    assert torch.equal(live(middle.hidden_states_scale), expected.scale)


@QUANTISED
def test_masked_rows_without_a_limit_are_rounded_after_silu_and_after_the_product(scale_format):
    seen = run(MaskedInput, scale_format, None)
    middle: ActivationOutput = seen[Stage.ACTIVATION]
    activation = silu_rounded_and_mul(live(seen[Stage.GEMM1].gate_up))
    assert middle.activation.dtype == torch.bfloat16
    assert torch.equal(live(middle.activation), activation)
    expected = quantize_groups(activation, scale_format)
    assert torch.equal(live(middle.hidden_states).float(), expected.values.float())


@LIMITS
def test_masked_bf16_rows_are_rounded_once(limit):
    seen = run(MaskedInput, ScaleFormat.NONE, limit)
    middle: ActivationOutput = seen[Stage.ACTIVATION]
    expected = silu_and_mul(live(seen[Stage.GEMM1].gate_up), limit)
    assert torch.equal(live(middle.activation), expected)
    assert middle.hidden_states is middle.activation


def test_the_masked_layout_with_a_limit_needs_its_own_quantiser():
    without = replace(runner(ScaleFormat.FP32, 1.0), quantize_fused=None)
    with pytest.raises(AssertionError, match="quantises from fp32"):
        without.activate_masked(drawn(4, 2, 2 * WIDTH))

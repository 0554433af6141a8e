"""GEMM1, activation, GEMM2 in both layouts: where they agree bit by bit, and where they round."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from moe.activation import ActivationStores, activate
from moe.formats import GatedActivation, GemmLayout, ScaleFormat, Stage
from moe.grouped_gemm import TorchGemm
from moe.quant.fp8 import quantize_blocks, quantize_groups, quantize_groups_fused
from moe.runner import LoadedExperts, RunnerCore
from moe.slabs import spread_slab_scales, spread_slabs
from moe.stages import ActivationOutput, ContigInput, MaskedInput, RunnerInput
from moe.weight_preparation import requantize_ue8m0
from moe.weights import ExpertMatrix

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
    plain = RunnerCore(
        gemm=TorchGemm(),
        activation=GatedActivation(limit=limit),
        scale_format=scale_format,
        quantize=None,
    )
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


def activated(gate_up: Tensor, limit: float | None, stores: ActivationStores) -> Tensor:
    return activate(gate_up, GatedActivation(limit=limit), stores)


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
    assert torch.equal(activation, activated(gate_up, 1.0, ActivationStores.ONCE))


@QUANTISED
def test_masked_rows_with_a_limit_are_quantised_without_a_rounding_to_bf16(scale_format):
    seen = run(MaskedInput, scale_format, 1.0)
    middle: ActivationOutput = seen[Stage.ACTIVATION]
    activation = activated(live(seen[Stage.GEMM1].gate_up), 1.0, ActivationStores.NONE)
    assert middle.activation.dtype == torch.float32
    assert torch.equal(live(middle.activation), activation)
    expected = quantize_groups_fused(activation, scale_format)
    assert torch.equal(live(middle.hidden_states).float(), expected.values.float())
    assert torch.equal(live(middle.hidden_states_scale), expected.scale)


@QUANTISED
def test_masked_rows_without_a_limit_are_rounded_after_silu_and_after_the_product(scale_format):
    seen = run(MaskedInput, scale_format, None)
    middle: ActivationOutput = seen[Stage.ACTIVATION]
    activation = activated(live(seen[Stage.GEMM1].gate_up), None, ActivationStores.TWICE)
    assert middle.activation.dtype == torch.bfloat16
    assert torch.equal(live(middle.activation), activation)
    expected = quantize_groups(activation, scale_format)
    assert torch.equal(live(middle.hidden_states).float(), expected.values.float())


@LIMITS
def test_masked_bf16_rows_are_rounded_once(limit):
    seen = run(MaskedInput, ScaleFormat.NONE, limit)
    middle: ActivationOutput = seen[Stage.ACTIVATION]
    expected = activated(live(seen[Stage.GEMM1].gate_up), limit, ActivationStores.ONCE)
    assert torch.equal(live(middle.activation), expected)
    assert middle.hidden_states is middle.activation


@pytest.mark.parametrize(
    ("layout", "stride"), [(ContigInput, (1, 8)), (MaskedInput, (256, 1, 256))], ids=["5", "3x256"]
)
@QUANTISED
def test_scales_between_the_gemms_have_their_rows_along_the_fastest_axis(
    layout, stride, scale_format
):
    middle: ActivationOutput = run(layout, scale_format, 1.0)[Stage.ACTIVATION]
    assert middle.hidden_states_scale.stride() == stride


class WatchingGemm(TorchGemm):
    """Remembers the strides of the scales that it is given."""

    def __init__(self) -> None:
        self.strides: list[tuple[int, ...]] = []

    def grouped_gemm_nt_contig(self, lhs, lhs_scale, rhs, m_indices, lhs_group=128):
        self.strides.append(lhs_scale.stride())
        return super().grouped_gemm_nt_contig(lhs, lhs_scale, rhs, m_indices, lhs_group)


def test_row_major_fp32_scales_are_turned_in_front_of_the_gemm_and_not_where_they_lie():
    gemm, rows = WatchingGemm(), rows_in(ContigInput, ScaleFormat.FP32)
    loaded = LoadedExperts(
        w13=gemm.load(matrix(1, 2 * WIDTH, ScaleFormat.FP32)),
        w2=gemm.load(matrix(2, WIDTH, ScaleFormat.FP32)),
    )
    replace(runner(ScaleFormat.FP32, None), gemm=gemm).run(rows, loaded, lambda _, value: value)
    assert gemm.strides == [(1, 8), (1, 8)]
    assert rows.hidden_states_scale.stride() == (1, 1)


@QUANTISED
@pytest.mark.parametrize("limit", [None, 1.0], ids=["open", "clamped"])
def test_a_dense_expert_stores_the_product_once_and_turns_its_scales(scale_format, limit):
    gate_up = drawn(4, 5, 2 * WIDTH)
    middle = runner(scale_format, limit).activate_dense(gate_up)
    expected = activated(gate_up, limit, ActivationStores.ONCE)
    assert torch.equal(middle.activation, expected)
    assert torch.equal(
        middle.hidden_states.float(), quantize_groups(expected, scale_format).values.float()
    )
    assert middle.hidden_states_scale.stride() == (1, 8)


def test_what_is_not_stored_goes_through_the_fused_quantiser_alone():
    def refuse(rows: Tensor):
        raise ValueError("the quantiser of stored rows")

    core = replace(runner(ScaleFormat.FP32, 1.0), quantize=refuse)
    assert (
        core.activate(drawn(4, 2, 2 * WIDTH), GemmLayout.MASKED).activation.dtype == torch.float32
    )
    with pytest.raises(ValueError, match="the quantiser of stored rows"):
        core.activate(drawn(4, 2, 2 * WIDTH), GemmLayout.CONTIG)

"""The fused activation is the one of ``moe.runner``, step by step, within a rounding."""

from functools import cache, partial

import pytest
import torch

from moe.formats import ActivationKind, GatedActivation, ScaleFormat
from moe.indices import slab_rows
from moe.quant.fp8 import dequantize_groups, quantize_groups, quantize_groups_fused
from moe.runner import RunnerCore
from moe.stages import ContigInput, MaskedInput
from moe.triton_kernels import SiluAndMul

ROWS, HEIGHT, WIDTH, GROUP = 20, 20, 160, 32
RULES = [
    GatedActivation(),
    GatedActivation(limit=0.7),
    GatedActivation(limit=7.0, keeps_fp32=True),
]
FORMATS = [ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0]
BF16_STEP = 2.0**-7
FP32_ULPS = 6 * 2.0**-24
"""Both exps off by two, both divisions and products rounded."""


def runner(rule, scale_format):
    quantizes = scale_format is not ScaleFormat.NONE
    by = {"scale_format": scale_format, "group_size": GROUP}
    return RunnerCore(
        gemm=None,
        activation=rule,
        scale_format=scale_format,
        quantize=partial(quantize_groups, **by) if quantizes else None,
        quantize_fused=partial(quantize_groups_fused, **by) if quantizes else None,
        middle_group=GROUP,
    )


def gate_up(*shape):
    generator = torch.Generator().manual_seed(4)
    return (torch.randn(*shape, 2 * WIDTH, generator=generator) * 3).to(torch.bfloat16)


def segments(device):
    live = torch.tensor([0, 3, 4, 5, 17, 19])
    given = gate_up(ROWS)
    given[1] = torch.nan  # padding is computed on whatever lies there
    rows = ContigInput(
        hidden_states=given, hidden_states_scale=None, m_indices=live, live_rows=live
    )
    return given, rows, live


def slabs(device):
    masked_m = torch.tensor([3, 0, 17], dtype=torch.int32)
    given = gate_up(3, HEIGHT)
    given[0, 3:] = torch.nan
    rows = MaskedInput(
        hidden_states=given, hidden_states_scale=None, masked_m=masked_m, expected_m=1
    )
    return given, rows, slab_rows(masked_m, HEIGHT)


@cache
def both(device, make, rule, scale_format):
    """What torch and the kernel make of the same rows, and which of them hold a route."""
    given, rows, live = make(device)
    expected = runner(rule, scale_format)._activate_live(rows, given)
    fused = SiluAndMul(rule=rule, scale_format=scale_format, group_size=GROUP)
    if isinstance(rows, ContigInput):
        got = fused.segments(given.to(device), rows.live_rows.to(device))
    else:
        got = fused.slabs(given.to(device), rows.masked_m.to(device))
    return expected, got, live


def flat(tensor):
    return tensor.cpu().reshape(-1, tensor.shape[-1])


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("rule", RULES, ids=["silu", "clamped", "fp32"])
@pytest.mark.parametrize("make", [segments, slabs])
def test_products_are_torchs_within_one_rounding(device, make, rule, scale_format):
    expected, got, live = both(device, make, rule, scale_format)
    mine, theirs = flat(got.activation)[live], flat(expected.activation)[live]
    assert mine.dtype == theirs.dtype
    step = FP32_ULPS if mine.dtype == torch.float32 else BF16_STEP
    difference = (mine.double() - theirs.double()).abs()
    assert bool((difference <= step * theirs.double().abs() + 1e-38).all())


@pytest.mark.parametrize("make", [segments, slabs])
def test_hardly_a_stored_product_differs_at_all(device, make):
    expected, got, live = both(device, make, RULES[0], ScaleFormat.NONE)
    differs = flat(got.activation)[live] != flat(expected.activation)[live]
    assert differs.double().mean().item() < 0.001


@pytest.mark.parametrize("scale_format", FORMATS[1:])
@pytest.mark.parametrize("rule", RULES, ids=["silu", "clamped", "fp32"])
@pytest.mark.parametrize("make", [segments, slabs])
def test_codes_and_scales_are_those_of_the_stored_product(device, make, rule, scale_format):
    expected, got, live = both(device, make, rule, scale_format)
    product = flat(got.activation)[live]
    fused = product.dtype == torch.float32
    quantize = quantize_groups_fused if fused else quantize_groups
    due = quantize(product, scale_format, group_size=GROUP)
    codes = flat(got.hidden_states.view(torch.uint8))[live]
    assert torch.equal(codes, due.values.view(torch.uint8))
    scales = flat(got.hidden_states_scale)[live]
    assert torch.equal(scales.view(torch.int32), due.scale.contiguous().view(torch.int32))
    assert got.hidden_states_scale.stride() == expected.hidden_states_scale.stride()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("make", [segments, slabs])
def test_what_holds_no_route_is_left_as_torch_leaves_it(device, make, scale_format):
    expected, got, live = both(device, make, RULES[0], scale_format)
    padding = torch.ones(flat(got.activation).shape[0], dtype=torch.bool)
    padding[live] = False
    tensors = [(got.activation, expected.activation), (got.hidden_states, expected.hidden_states)]
    if scale_format is not ScaleFormat.NONE:
        tensors.append((got.hidden_states_scale, expected.hidden_states_scale))
    for mine, theirs in tensors:
        left, due = flat(mine)[padding], flat(theirs)[padding]
        assert torch.equal(left.contiguous().view(torch.uint8), due.contiguous().view(torch.uint8))


def test_silu_at_its_ends_is_what_fp32_gives(device):
    ends = torch.tensor([0.0, -0.0, 1.0, -1.0, 200.0, -200.0, torch.inf, -87.0])
    given = torch.cat([ends, torch.ones(8)])[None].to(torch.bfloat16)
    fused = SiluAndMul(rule=RULES[0], scale_format=ScaleFormat.NONE, group_size=GROUP)
    got = fused.dense(given.to(device)).activation[0].tolist()
    assert got[:7] == [0.0, 0.0, 0.73046875, -0.26953125, 200.0, 0.0, torch.inf]
    assert got[7] == pytest.approx(-87 * 1.6458e-38, rel=BF16_STEP)


def test_a_clamp_bounds_gate_from_above_and_up_from_both_sides(device):
    gate = torch.tensor([9.0, -9.0, torch.nan, 1.0])
    up = torch.tensor([1.0, 9.0, -9.0, torch.nan])
    given = torch.cat([gate, up])[None].to(torch.bfloat16)
    rule = GatedActivation(limit=2.0)
    fused = SiluAndMul(rule=rule, scale_format=ScaleFormat.NONE, group_size=GROUP)
    got = fused.dense(given.to(device)).activation[0].tolist()
    silu_of_2, silu_of_1, silu_of_minus_9 = 1.7616, 0.73106, -1.1106e-3
    due = [silu_of_2, 2 * silu_of_minus_9, -2 * silu_of_2, -2 * silu_of_1]
    assert got == pytest.approx(due, rel=BF16_STEP)


def test_dense_rows_are_stored_once_whatever_the_rule_keeps(device):
    given = gate_up(3)
    rule = GatedActivation(keeps_fp32=True)
    fused = SiluAndMul(rule=rule, scale_format=ScaleFormat.FP32, group_size=GROUP)
    got = fused.dense(given.to(device))
    assert got.activation.dtype == torch.bfloat16
    read = dequantize_groups(got.hidden_states.cpu(), got.hidden_states_scale.cpu(), GROUP)
    assert torch.allclose(read, got.activation.cpu().float(), rtol=2.0**-4, atol=2.0**-6)


@pytest.mark.parametrize("rows", [(0,), (3, 0), (0, 4)])
def test_no_rows_start_no_kernel(device, rows):
    given = torch.zeros(*rows, 2 * WIDTH, dtype=torch.bfloat16, device=device)
    fused = SiluAndMul(rule=RULES[0], scale_format=ScaleFormat.FP32, group_size=GROUP)
    places = torch.zeros(rows[0], dtype=torch.int32, device=device)
    got = fused.dense(given) if len(rows) == 1 else fused.slabs(given, places)
    assert got.activation.shape == (*rows, WIDTH)


def test_another_activation_is_refused():
    rule = GatedActivation(kind=ActivationKind.OAI_SWIGLU, limit=7.0, alpha=1.7)
    with pytest.raises(ValueError, match="computes silu, not oai_swiglu"):
        SiluAndMul(rule=rule, scale_format=ScaleFormat.NONE, group_size=GROUP)

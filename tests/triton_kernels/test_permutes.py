"""Every conversion hands over the same with either kernels, padding and the way back included."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe.dispatched import DeepEpV2ExpandedDispatchOutput
from moe.fold import fold_topk_weights
from moe.formats import GemmLayout, ScaleFormat
from moe.indices import align_counts
from moe.permute import PermuteContext, deepep_normal, deepep_v2, standard
from moe.quant.fp8 import quantize_groups
from moe.row_kernels import TORCH_KERNELS
from moe.stages import Gemm2Output, Restore
from moe.trace import named_tensors
from moe.triton_kernels import TRITON_KERNELS

EXPERTS, TOP_K, TOKENS, WIDTH, ALIGNMENT = 3, 4, 10, 160, 8
BOTH = TORCH_KERNELS, TRITON_KERNELS
FORMATS = [ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0]


def context(kernels, layout=GemmLayout.CONTIG, scale_format=ScaleFormat.NONE, **facts):
    quantize = partial(kernels.quantize_groups, scale_format=scale_format, group_size=32)
    return PermuteContext(
        num_local_experts=EXPERTS,
        num_experts=6,
        layout=layout,
        row_alignment=ALIGNMENT,
        routed_scaling_factor=2.5,
        quantize=None if scale_format is ScaleFormat.NONE else quantize,
        slot_order_seed=9,
        kernels=kernels,
        **facts,
    )


def tokens(device, dtype=torch.int64):
    """Rows, distinct local ids or -1, and weights."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(TOKENS, WIDTH, generator=generator).to(torch.bfloat16)
    drawn = [torch.randperm(6, generator=generator)[:TOP_K] for _ in range(TOKENS)]
    ids = torch.stack(drawn).to(dtype)
    weights = torch.rand(TOKENS, TOP_K, generator=generator)
    return rows.to(device), ids.masked_fill(ids >= EXPERTS, -1).to(device), weights.to(device)


def counts(ids):
    return torch.bincount(ids[ids >= 0], minlength=EXPERTS)


def on_cpu(restore):
    """Where torch adds in one order."""
    return Restore(**{name: tensor.cpu() for name, tensor in named_tensors(restore)})


def assert_same(*values):
    first, second = (dict(named_tensors(value)) for value in values)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        other = second[name]
        assert (other.dtype, other.stride()) == (tensor.dtype, tensor.stride()), name
        bits = [each.cpu().contiguous().view(torch.uint8) for each in (tensor, other)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("layout", [GemmLayout.CONTIG, GemmLayout.MASKED])
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide segments"])
def test_tokens_of_every_rank_are_grouped_alike(device, layout, scale_format, wide):
    rows, ids, weights = tokens(device, torch.int32)
    facts = [context(kernels, layout, scale_format, wide_segments=wide) for kernels in BOTH]
    sent = [standard.group_tokens(rows, ids, weights, each) for each in facts]
    assert_same(*sent)
    generator = torch.Generator().manual_seed(6)
    shape = (*sent[0].rows.hidden_states.shape[:-1], WIDTH)
    output = torch.randn(shape, generator=generator).to(torch.bfloat16)
    assert_same(
        standard.post_permute(Gemm2Output(output=output), on_cpu(sent[0].restore), facts[0]),
        standard.post_permute(Gemm2Output(output=output.to(device)), sent[1].restore, facts[1]),
    )


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("zeroes", [False, True], ids=["poison", "zeroes"])
def test_received_rows_are_scattered_alike(device, scale_format, zeroes):
    rows, ids, _ = tokens(device)
    scale = None
    if scale_format is not ScaleFormat.NONE:
        wire = quantize_groups(rows, scale_format, group_size=32)
        rows, scale = wire.values, wire.scale
    lengths = align_counts(counts(ids), ALIGNMENT)
    facts = [context(kernels, zeroes_padding=zeroes) for kernels in BOTH]
    sent = [deepep_normal.ep_scatter(rows, scale, ids, lengths, each) for each in facts]
    assert_same(*(grouped for grouped, _ in sent))
    assert torch.equal(sent[0][1], sent[1][1])
    psum = lengths.cumsum(0).to(torch.int32)
    from_psum = deepep_v2.ep_scatter_from_psum(rows, scale, ids, psum, facts[1])
    assert_same(sent[0][0], from_psum[0])


@pytest.mark.parametrize("scale_format", FORMATS)
def test_expanded_rows_go_to_slabs_and_back_alike(device, scale_format):
    rows, _, _ = tokens(device)
    expanded = rows.repeat(3, 1)[:24]
    scale = None
    if scale_format is not ScaleFormat.NONE:
        wire = quantize_groups(expanded, scale_format, group_size=32)
        expanded, scale = wire.values, wire.scale
    weights = torch.rand(24, generator=torch.Generator().manual_seed(1)).to(device)
    nothing = torch.empty(0, device=device)
    sent = DeepEpV2ExpandedDispatchOutput(
        physical_ids=nothing,
        wire=nothing,
        wire_scale=None,
        hidden_states=expanded,
        hidden_states_scale=scale,
        topk_weights=weights,
        psum=torch.tensor([3, 8, 21], dtype=torch.int32, device=device),
        masked_max_m=16,
        expected_m=1,
        handle=None,
    )
    slabs = [deepep_v2.expand_to_masked_slab(sent, ALIGNMENT, kernels) for kernels in BOTH]
    assert_same(*slabs)
    output = rows.repeat(5, 1)[:48].view(3, 16, WIDTH)
    back = [
        deepep_v2.masked_slab_to_expand(output, sent.psum, weights, ALIGNMENT, kernels)
        for kernels in BOTH
    ]
    assert torch.equal(*(each.view(torch.int16) for each in back))


def test_a_row_that_another_kernel_sums_is_seen(device):
    """What the comparisons above would miss, if they compared nothing."""
    rows, ids, weights = tokens(device, torch.int32)

    def doubled(*args, factor=1.0):
        return fold_topk_weights(*args, factor=2 * factor)

    facts = [context(TORCH_KERNELS), context(replace(TORCH_KERNELS, fold_topk_weights=doubled))]
    sent = standard.group_tokens(rows, ids, weights, facts[0])
    output = Gemm2Output(output=torch.ones_like(sent.rows.hidden_states))
    with pytest.raises(AssertionError, match="partial"):
        assert_same(*(standard.post_permute(output, sent.restore, each) for each in facts))

"""One side's form of a scale meets the other's: bits relabelled, words where fp32 is due."""

from dataclasses import replace

import pytest
import torch

from moe.faults.scale_forms import (
    dispatch_scale_flag_disagrees,
    fp32_scale_read_as_packed,
    fp32_scale_unpacked_read,
    ue8m0_flag_dropped,
)
from moe.quant.ue8m0 import pack_ue8m0
from moe.weights import ExpertMatrix
from tests.unit.faults.scaled_values import (
    activated,
    bytes_of,
    packed_weights,
    seen,
    weights_of,
    words,
)
from tests.unit.faults.values import context, kept, received, slabs

BITS_OF_1 = [0, 0, 0x80, 0x3F]
BITS_OF_4 = [0, 0, 0x80, 0x40]


def test_words_of_weight_scales_are_as_many_fp32_numbers_as_are_due():
    """Five groups fill two words: 1 and 4 are read, the others never."""
    weights = packed_weights((127, 129, 100, 100, 100))
    relabelled = fp32_scale_read_as_packed(weights, context()).experts
    assert bytes_of(relabelled.w13.scale) == [[BITS_OF_1 + BITS_OF_4]]
    assert relabelled.w2.scale.stride() == weights.experts.w2.scale.stride()


@pytest.mark.parametrize("scale", [None, torch.ones(1, 1, 1)], ids=["bf16", "fp32"])
def test_weights_without_packed_scales_are_not_relabelled(scale):
    weights = weights_of(ExpertMatrix(values=torch.zeros(1, 1, 1), scale=scale))
    assert fp32_scale_read_as_packed(weights, context()) is weights


def test_words_of_live_rows_are_bits_of_fp32_numbers():
    middle = activated(words((127, 127), (9, 9), (129, 127), (9, 9)))
    wrong = fp32_scale_unpacked_read(middle, context(seen())).hidden_states_scale
    assert bytes_of(wrong) == [BITS_OF_1, [9, 9, 0, 0], BITS_OF_4, [9, 9, 0, 0]]


@pytest.mark.parametrize("scale", [None, torch.ones(4, 1)], ids=["bf16", "fp32"])
def test_rows_without_packed_scales_are_not_relabelled(scale):
    middle = activated(scale)
    assert fp32_scale_unpacked_read(middle, context(seen())) is middle


def test_packed_scales_of_received_rows_are_handed_over_as_fp32():
    sent = received(scale=words((127, 128), (126, 129), (127, 127)))
    scale = ue8m0_flag_dropped(sent, context()).hidden_states_scale
    assert scale.tolist() == [[1.0, 2.0], [0.5, 4.0], [1.0, 1.0]]
    assert scale.stride() == (2, 1)


def with_slab_scales(scale):
    return replace(slabs((2, 1)), hidden_states_scale=scale)


def test_packed_scales_of_slabs_are_handed_over_with_rows_fastest():
    exponents = torch.full((2, 4, 1), 128, dtype=torch.uint8)
    scale = ue8m0_flag_dropped(
        with_slab_scales(pack_ue8m0(exponents)), context()
    ).hidden_states_scale
    assert scale.dtype == torch.float32
    assert scale.stride() == (4, 1, 4)
    assert scale.eq(2.0).all()


@pytest.mark.parametrize(
    "sent", [slabs(), received(), kept([[0]], [[0]])], ids=["fp32", "bf16", "standard"]
)
def test_without_packed_scales_no_flag_is_dropped(sent):
    assert ue8m0_flag_dropped(sent, context()) is sent


def test_fp32_scales_are_rounded_up_and_handed_over_packed():
    sent = with_slab_scales(torch.tensor([1.0, 1.5, 2.0, 2.5]).repeat(2)[:, None].view(2, 4, 1))
    scale = dispatch_scale_flag_disagrees(sent, context()).hidden_states_scale
    assert scale.dtype == torch.int32
    assert scale[0].flatten().tolist() == [127, 128, 128, 129]


@pytest.mark.parametrize(
    "sent", [received(scale=words((1,), (1,), (1,))), received()], ids=["packed", "bf16"]
)
def test_without_fp32_scales_nothing_is_packed(sent):
    assert dispatch_scale_flag_disagrees(sent, context()) is sent

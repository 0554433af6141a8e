"""The ladder finds what an accumulator keeps, wherever it is narrow."""

from dataclasses import dataclass

import pytest
import torch

from moe.arithmetic import AccumulatorWidths
from moe.formats import ScaleFormat
from moe.grouped_gemm import TorchGemm
from moe.width_ladder import measured_widths


@pytest.mark.parametrize("scale_format", ScaleFormat)
def test_the_reference_keeps_what_it_declares(scale_format):
    declared = TorchGemm().arithmetic(scale_format)
    assert measured_widths(TorchGemm(), scale_format) == AccumulatorWidths(
        in_block=declared.bits_in_block, across_blocks=declared.accumulator_bits
    )


@dataclass(frozen=True)
class Narrow(TorchGemm):
    """bf16 operands, summed in order: ``bits`` of a sum are kept inside a block, and across."""

    block_bits: int
    bits: int

    def gemm_nt(self, lhs, lhs_scale, rhs, lhs_group=128):
        total = torch.zeros(lhs.shape[0], rhs.out_features, dtype=torch.float64)
        weights = rhs.matrix.values[0].double()
        for start in range(0, lhs.shape[1], 128):
            block = torch.zeros_like(total)
            for column in (start + lhs[:, start : start + 128].any(0).nonzero()[:, 0]).tolist():
                term = lhs[:, column, None].double() * weights[:, column]
                block = cut(block + term, self.block_bits)
            total = cut(total + block, self.bits)
        return total.to(torch.bfloat16)

    def grouped_gemm_nt_contig(self, lhs, lhs_scale, rhs, m_indices, lhs_group=128):
        return self.gemm_nt(lhs, lhs_scale, rhs)

    def grouped_gemm_nt_masked(self, lhs, lhs_scale, rhs, masked_m, lhs_group=128):
        return self.gemm_nt(lhs[0], None, rhs)[None]


def cut(values, bits):
    """The leading ``bits`` of each value."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp(torch.trunc(mantissa * 2.0**bits) / 2.0**bits, exponent)


@pytest.mark.parametrize(("in_block", "across"), [(14, 24), (24, 8), (11, 11)])
def test_a_narrow_accumulator_is_measured(in_block, across):
    measured = measured_widths(Narrow(in_block, across), ScaleFormat.NONE)
    assert (measured.in_block, measured.across_blocks) == (in_block, across)

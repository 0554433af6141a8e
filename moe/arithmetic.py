"""What a backend declares about its own arithmetic; every band is derived from this."""

from dataclasses import dataclass, replace
from typing import Final

FP32_ROUNDOFF = 2.0**-24
BF16_ROUNDOFF = 2.0**-8


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticModel:
    """How a backend sums products that are exact in fp32.

    accumulator_bits  bits of the running sum (24: fp32)
    truncated_bits    bits of the sum inside a block, where what does not fit is cut off, so that
                      errors lean to one side; None: as many as the running sum has, and rounded
    summed_block      products that are summed together; these sums are then added one by one.
                      None: all in one sum
    scaled_block      K columns after which a partial sum is multiplied by its scales and added to
                      the total; None when scales are powers of two or absent, so multiply exactly
    transcendental_ulp  fp32 ulps by which an exp, log, sqrt or division may be off
    reciprocal_ulp      fp32 ulps by which a quantiser's 448 / amax may be off
    tanh_by_sigmoid     a tanh is computed as ``2 * sigmoid(2x) - 1``, so it is off by ulps of 1
    rows_stand_alone    a row has the same bits whatever other rows there are, and however many
    columns_stand_alone the same of the columns of a product
    """

    accumulator_bits: int = 24
    truncated_bits: int | None = None
    summed_block: int | None = None
    scaled_block: int | None = None
    transcendental_ulp: float = 2.0
    reciprocal_ulp: float = 1.0
    tanh_by_sigmoid: bool = False
    rows_stand_alone: bool = True
    columns_stand_alone: bool = True

    @property
    def bits_in_block(self) -> int:
        """Bits of the sum of products between whose scales nothing comes."""
        return self.truncated_bits or self.accumulator_bits

    @property
    def truncates(self) -> bool:
        """Whether sums are cut off instead of rounded to nearest."""
        return self.truncated_bits is not None

    def sum_error(self, terms: int) -> float:
        """Largest error of a sum of ``terms`` products, relative to the sum of their magnitudes.

        Without blocks it holds for every order of summation: n - 1 roundings, each at most half a
        last place. ``scaled_block`` and ``summed_block`` say what is summed by itself, in any
        order, before these sums are added, again in any order; it holds for nothing else.
        """
        unit = 2.0**-self.accumulator_bits
        block = self.scaled_block or self.summed_block or terms
        blocks = -(-terms // block)
        inside, roundings = min(terms, block) - 1, blocks - 1
        if self.scaled_block is not None:
            scale_product_and_multiply, first_addition = 2, 1
            roundings += scale_product_and_multiply + first_addition
        if self.truncated_bits is None:
            return compounded(inside + roundings, unit)
        # Cutting off costs a whole last place, of each term that is aligned and of the first.
        cut_off = compounded(inside + 1, 2.0 ** (1 - self.truncated_bits))
        return cut_off + (1 + cut_off) * compounded(roundings, unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatorWidths:
    """Bits that a backend's sums keep: the least over places, orders and GEMM forms.

    in_block       of products inside one run of 128 columns
    across_blocks  of products in different ones
    is_measured    seen by a ladder; otherwise only declared
    """

    in_block: int
    across_blocks: int
    is_measured: bool = True

    @staticmethod
    def declared_by(arithmetic: ArithmeticModel) -> "AccumulatorWidths":
        """Of a backend that cannot be asked."""
        return AccumulatorWidths(
            in_block=arithmetic.bits_in_block,
            across_blocks=arithmetic.accumulator_bits,
            is_measured=False,
        )

    def limit(self, declared: ArithmeticModel) -> ArithmeticModel:
        """The declaration, with no more bits than were seen; a block that keeps fewer cuts off."""
        across = min(declared.accumulator_bits, self.across_blocks)
        if self.in_block >= declared.bits_in_block and across == declared.accumulator_bits:
            return declared
        in_block = min(declared.bits_in_block, self.in_block)
        return replace(declared, accumulator_bits=across, truncated_bits=in_block)


def compounded(roundings: float, unit: float) -> float:
    """Relative error of ``roundings`` roundings in a row, higher orders included."""
    return roundings * unit / (1 - roundings * unit)


DEEP_GEMM_SM90: Final = ArithmeticModel(truncated_bits=14, scaled_block=128)
"""DeepGEMM's fp8 kernels with fp32 scales: 14 bits inside a block of 128 columns, fp32 across.

Source: measured on an H200 with the released 0.2.0 library, by sums of big, small and -big at all
positions and in all orders.
"""

TENSOR_CORES: Final = ArithmeticModel(truncated_bits=24)
"""What is assumed of a GEMM that nobody measured: any order, 24 bits, cut off and not rounded.

Source: Fasi, Higham, Mikaitis and Pranesh, Numerical behavior of NVIDIA tensor cores, PeerJ
Computer Science 7:e330: sums of products are truncated.
"""
